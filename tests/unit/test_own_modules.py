"""The notebook's own modules on machines that lack them: what is sent, and how a worker imports it."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from accel_nb.errors import ShippingError
from accel_nb.notebook.session import own_modules
from accel_nb.notebook.session.module_sync import WorkerModules
from accel_nb.notebook.session.own_modules import SentUserModules
from accel_nb.notebook.worker.sent_modules import SentModules

CELL = ast.parse("from helper import double\nimport json, absent")
HELPER = """import inner.parts
from inner import ONE


def double(x):
    return 2 * x


def fail():
    raise OSError
"""
FILES = {
    "helper.py": HELPER,
    "inner/__init__.py": "from .parts import TWO\n\nONE = 1\n",
    "inner/parts.py": "# coding: latin-1\nTWO = 'zwei \xe4'\n",
    "inner/deep/more.py": "import other\n",
    "inner/data.txt": "no source",
    "other.py": "",
    "unused.py": "",
}
IMPORT = """
import inspect, json, sys, traceback
from accel_nb.notebook.messages import SentModule
from accel_nb.notebook.session.module_sync import WorkerModules
from accel_nb.notebook.worker.sent_modules import SentModules
sent = SentModules()
record = WorkerModules(sent)
last = next(reversed(sys.modules))
sent.add([SentModule(**module) for module in json.loads(sys.stdin.readline())])
import helper, inner.deep.more
found = [helper.double(2), helper.inner.parts.TWO, helper.__file__, inspect.getsource(helper.double)]
try:
    helper.fail()
except OSError:
    found.append(traceback.format_exc())
sys.modules[last] = sys.modules.pop(last)  # as if it was imported again after the user's modules
imported = record.new_imports()
sent.add([SentModule(**module) for module in json.loads(sys.stdin.readline())])
record.reload({"helper": "edited"})
print(json.dumps([*found, imported, helper.double(2)]))
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="latin-1")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        monkeypatch.delitem(sys.modules, name)  # they are the user's own too, and many
    return tmp_path


def names_of(record: SentUserModules, tree: ast.Module = CELL) -> set[str]:
    # Modules of the tests are the user's own too.
    return {module.name for module in record.collect(tree)[0] if not module.name.startswith("tests")}


def test_what_a_cell_imports_is_sent_with_what_that_imports_once_and_again_when_it_has_changed(project: Path) -> None:
    record = SentUserModules()
    assert names_of(record) == {"helper", "inner", "inner.parts", "inner.deep.more", "other"}
    assert names_of(record) == set()
    (project / "other.py").write_text("import unused\n")
    assert names_of(record) == {"other", "unused"}
    record.clear()
    assert len(names_of(record)) == 6


def test_a_package_that_is_too_large_is_left_out_with_one_line(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_modules, "_MAX_FILES", 2)
    record = SentUserModules()
    modules, lines = record.collect(ast.parse("import inner, helper"))
    assert {module.name for module in modules if not module.name.startswith("tests")} == {"helper"}
    assert [line for line in lines if "inner" in line] == [
        "the package inner is too large to be sent: nodes import their own, if they have one"
    ]
    assert not [line for line in record.collect(CELL)[1] if "inner" in line]


def test_a_worker_imports_what_was_sent_and_reloads_newer_versions(project: Path, tmp_path: Path) -> None:
    record = SentUserModules()
    first = [asdict(module) for module in record.collect(CELL)[0] if not module.name.startswith("tests")]
    text = FILES["helper.py"].replace("2 * x", "20 * x")
    (project / "helper.py").write_text(text)
    second = [asdict(module) for module in record.collect(CELL)[0]]
    for name in FILES:
        (project / name).unlink()
    done = subprocess.run(
        [sys.executable, "-c", IMPORT],
        input=f"{json.dumps(first)}\n{json.dumps(second)}\n",
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(own_modules.__file__).parents[3])},
    )
    assert done.returncode == 0, done.stderr
    double, two, file, source, shown, imported, changed = json.loads(done.stdout)
    assert (double, two, changed) == (4, "zwei \xe4", 40)
    assert file == str(project / "helper.py")
    assert source == "def double(x):\n    return 2 * x\n"
    assert f'File "{file}", line 10, in fail' in shown
    assert "raise OSError" in shown
    assert imported["helper"] == [file, *(first_stamp(first, "helper"))]


def test_a_module_that_no_import_finds_is_sent_once_and_again_when_it_has_changed(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "apart").mkdir()
    file = tmp_path / "apart" / "generated.py"
    file.write_text("ONE = 1\n")
    record = SentUserModules()
    monkeypatch.syspath_prepend(str(project))
    for name, place in (("inner.generated", file), ("other", project / "other.py")):
        spec = importlib.util.spec_from_file_location(name, place)
        assert spec is not None
        monkeypatch.setitem(sys.modules, name, importlib.util.module_from_spec(spec))
    [sent] = record.collect_loaded_from_specs()
    assert (sent.name, sent.file, sent.text, sent.is_package) == ("inner.generated", str(file), "ONE = 1\n", False)
    assert record.collect_loaded_from_specs() == []
    file.write_text("ONE = 'one'\n")
    assert [module.text for module in record.collect_loaded_from_specs()] == ["ONE = 'one'\n"]


def test_submodules_that_a_failed_import_has_left_are_found_in_their_package(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "half").mkdir()
    (project / "half" / "__init__.py").write_text("import half.parts, half.bare.more, absent\n")
    (project / "half" / "parts.py").write_text("ONE = 1\n")
    (project / "half" / "bare").mkdir()
    (project / "half" / "bare" / "more.py").write_text("TWO = 2\n")
    (tmp_path / "parts").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(project))
    with pytest.raises(ImportError):
        importlib.import_module("half")
    try:
        assert {"half.parts", "half.bare.more"} <= sys.modules.keys()
        assert "half" not in sys.modules
        assert "half.parts" not in {module.name for module in SentUserModules().collect_loaded_from_specs()}
    finally:
        for name in [name for name in sys.modules if name.startswith("half.")]:
            del sys.modules[name]


def test_a_module_that_a_cell_uses_and_that_cannot_be_imported_is_named(project: Path) -> None:
    (project / "inner" / "broken.py").write_text("raise OSError('no display')\n")
    record = WorkerModules(SentModules())
    record.begin_run(["json.tool", "inner.absent"])
    with pytest.raises(ShippingError, match=r"inner\.broken cannot be imported on the workers: OSError: no display"):
        record.begin_run(["inner.broken"])


def first_stamp(modules: list[dict[str, object]], name: str) -> list[object]:
    [module] = [module for module in modules if module["name"] == name]
    return [module["mtime_ns"], module["size"]]
