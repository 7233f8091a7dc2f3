"""Where jobs of these tests run, and are recorded."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def folder(tmp_path: Path, project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working folder in which launches run with this copy of the package, and record their runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(project))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path
