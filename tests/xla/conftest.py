"""PyTorch/XLA for real, on its CPU device with four virtual chips: `make test-xla`, in an environment of its own."""

from __future__ import annotations

import os

import pytest

from accel_nb.runtime.process.hardware import why_no_xla

if why_no_xla() is None:
    os.environ["CPU_NUM_DEVICES"] = "4"  # read when torch_xla opens its device
    from accel_nb.runtime.world import World
    from accel_nb.strategies.xla import Xla

    Xla.capabilities.open_device(World())  # before the first backward pass of this process
else:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def rank_launcher() -> None:
    """Start the helper that forks ranks before a test looks for what it left behind."""
    from tests.ranks.launch import start_launcher

    start_launcher()
