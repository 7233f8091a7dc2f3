"""A Ray cluster and a kernel; they need the packages of `make test-engines`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.kernel import Kernel, running_kernel

TOKEN = "0123456789abcdef0123456789abcdef"


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> None:
    """Replace the check of all tests: the processes of a Ray cluster come and go by themselves."""


@contextmanager
def running_cluster() -> Iterator[str]:
    """Run a cluster with a token, and yield its address."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", TOKEN)
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.engines.cluster"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            address = process.stdout.readline().strip()
            assert address, "the cluster did not start"
            yield address
        finally:
            process.stdin.close()
            process.wait(60)
            process.stdout.close()


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a cluster."""
    with running_cluster() as address:
        yield address


@pytest.fixture
def kernel(cluster: str) -> Iterator[Kernel]:
    with loaded_kernel() as kernel:
        yield kernel


@contextmanager
def loaded_kernel() -> Iterator[Kernel]:
    """Run a kernel that has loaded the extension."""
    with running_kernel() as kernel:
        output = kernel.run("%load_ext accel_nb")
        assert output.error is None, output.traceback
        yield kernel
