"""What is said where workers cannot run."""

from __future__ import annotations

import os
import platform
import sys

import pytest

from accel_nb.runtime.process.system import why_no_workers


@pytest.mark.parametrize(
    ("system", "said"),
    [("Windows", "run Jupyter in WSL"), ("Darwin", "run Jupyter on Linux"), ("Linux", sys.executable)],
)
def test_why_workers_cannot_run_and_what_to_do(monkeypatch: pytest.MonkeyPatch, system: str, said: str) -> None:
    assert why_no_workers() is None
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr(platform, "system", lambda: system)

    why = why_no_workers()

    assert why is not None
    assert said in why
    assert "which Linux lacks" not in why
