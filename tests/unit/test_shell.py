"""The shell of a worker, also where IPython lacks what its newer versions have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from accel_nb.notebook.session import environment_sync
from accel_nb.notebook.session.environment_sync import EnvironmentSync
from accel_nb.notebook.worker.shell import WorkerDisplayHook


@pytest.mark.parametrize(
    ("source", "is_quiet"),
    [
        ("1 + 1", False),
        ("1 + 1;", True),
        ("1 + 1; ", True),
        ("1 + 1;  # shown?\n\n", True),
        ("1 + 1  # not this;", False),
        ("';'", False),
        ("1; 2", False),
        ("for _ in range(2):\n    pass;\n2", False),
        ("f(\n    1,\n);\n", True),
        ("", False),
    ],
)
def test_a_semicolon_at_the_end_hides_the_value(source: str, is_quiet: bool):
    hook: Any = SimpleNamespace(shell=SimpleNamespace(cell_text=source))  # nothing that IPython's own hook has
    assert WorkerDisplayHook.quiet(hook) is is_quiet


@pytest.mark.parametrize("compiler", [SimpleNamespace(), SimpleNamespace(format_code_name=lambda name: None)])
def test_a_cell_that_ipython_has_no_name_for_is_sent_without_one(compiler: object, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(environment_sync, "get_ipython", lambda: SimpleNamespace(compile=compiler))
    lines = ["def f():\n", "    return 1\n"]
    monkeypatch.setitem(environment_sync.linecache.cache, "<cell 1>", (20, None, lines, "<cell 1>"))
    code = compile("".join(lines), "<cell 1>", "exec")
    assert EnvironmentSync().new_sources([code]) == {"<cell 1>": ("".join(lines), "")}
