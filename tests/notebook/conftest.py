"""A kernel with the extension loaded, shared by the modules of tests.

A kernel and the process from which it forks workers both import torch, which takes as long as many modules' tests.
A module whose ``OWN_KERNEL`` is true gets a kernel of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.kernel import Kernel, running_kernel

# A module keeps the state, since `%reset` deletes the names of the notebook.
_KEEP_STATE = """
import os, sys, types
sys.modules["kept_state"] = types.SimpleNamespace(folder=os.getcwd(), variables=dict(os.environ), path=list(sys.path))
del os, sys, types
"""
_RESTORE_STATE = """
%reset -f
import kept_state, os, sys
os.chdir(kept_state.folder)
os.environ.clear()
os.environ.update(kept_state.variables)
sys.path[:] = kept_state.path
del kept_state, os, sys
"""


@contextmanager
def _loaded_kernel() -> Iterator[Kernel]:
    with running_kernel() as kernel:
        _run(kernel, "%load_ext accel_nb")
        yield kernel


@pytest.fixture(scope="session")
def shared_kernel() -> Iterator[Kernel]:
    with _loaded_kernel() as kernel:
        _run(kernel, _KEEP_STATE)
        yield kernel


@pytest.fixture(scope="module")
def kernel(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    if getattr(request.module, "OWN_KERNEL", False):
        with _loaded_kernel() as kernel:
            yield kernel
        return
    kernel = request.getfixturevalue("shared_kernel")
    yield kernel
    _run(kernel, _RESTORE_STATE)


def _run(kernel: Kernel, code: str) -> None:
    output = kernel.run(code)
    assert output.error is None, output.traceback
