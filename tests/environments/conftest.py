"""Writes what ran, with the versions of what it ran with, where `.ci/environments.py` asks for it."""

from __future__ import annotations

import json
import os
import platform
from datetime import date
from importlib import metadata
from pathlib import Path

import pytest

SHOWN = ("torch", "ipykernel", "ipython", "ipywidgets", "anywidget", "numpy", "pydantic", "matplotlib", "nbclient")
"""The packages whose versions are in the table."""

LOAD_S = pytest.StashKey[float]()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the result of each test of this folder to the file that ``ENVIRONMENT_REPORT`` names."""
    place = os.environ.get("ENVIRONMENT_REPORT")
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if place is None or reporter is None:
        return
    results = {
        report.nodeid.split("::")[-1].removeprefix("test_"): outcome
        for outcome in ("passed", "failed", "error", "skipped")
        for report in reporter.stats.get(outcome, [])
        if report.nodeid.startswith("tests/environments/")
    }
    if results:
        facts = {
            "date": str(date.today()),
            "python": platform.python_version(),
            "versions": {name: metadata.version(name).split("+")[0] for name in SHOWN},
            "load_s": round(session.config.stash.get(LOAD_S, 0.0), 2),
            "results": results,
        }
        Path(place).write_text(json.dumps(facts, indent=1))
