"""Modules of the notebook's folder on a machine that has no such folder."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.conftest import loaded_kernel
from tests.engines.node_cells import run
from tests.support.kernel import Kernel

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root, to hide a folder from a process"
)


@pytest.fixture
def other_python(tmp_path: Path) -> Path:
    """An interpreter that sees an empty folder in place of the notebook's."""
    project, command = tmp_path / "project", tmp_path / "python"
    project.mkdir()
    hide = f'mount -t tmpfs none "{project}" && exec "{sys.executable}" "$@"'
    command.write_text(f"#!/bin/sh\nexec unshare --mount sh -c '{hide}' python \"$@\"\n")
    command.chmod(0o755)
    return command


@pytest.fixture
def kernel(tmp_path: Path, other_python: Path) -> Iterator[Kernel]:
    with loaded_kernel() as kernel:
        run(kernel, f"%cd {tmp_path / 'project'}")
        yield kernel


NETS = """
import torch
from sizes import WIDTH
class Net(torch.nn.Linear):
    factor = 2
"""
LOOK = """
import os, sizes
seen = os.listdir(os.getcwd())
found = type(model).factor, sizes.WIDTH
"""


def test_modules_are_sent_and_sent_anew_when_they_have_changed(
    kernel: Kernel, tmp_path: Path, other_python: Path
) -> None:
    project = tmp_path / "project"
    (project / "nets.py").write_text(NETS)
    (project / "sizes.py").write_text("WIDTH = 3\n")
    flags = f"--engine ssh --engine.hosts localhost,localhost --nodes 2 --cpus 1 --engine.python {other_python}"
    run(kernel, "import nets\nmodel = nets.Net(nets.WIDTH, 1)")
    run(kernel, f"%%accelerate {flags}\n{LOOK}")
    assert kernel.value("seen") == []
    assert kernel.value("found") == (2, 3)
    (project / "sizes.py").write_text("WIDTH = 30\n")
    run(kernel, f"%%accelerate {flags}\nfound = sizes.WIDTH")
    assert kernel.value("found") == 30
    (project / "fails.py").write_text("def fail():\n    raise OSError('here')\n")
    failed = kernel.run(f"%%accelerate {flags}\nimport fails\nfails.fail()")
    assert failed.error is not None
    assert failed.error[0] == "OSError"
    assert "raise OSError('here')" in failed.traceback
