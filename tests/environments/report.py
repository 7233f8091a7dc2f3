"""A plugin of pytest that writes what ran, with the versions of what it ran with, for `.ci/environments.py`."""

from __future__ import annotations

import json
import os
import platform
from collections import Counter, defaultdict
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

SHOWN = ("torch", "ipykernel", "ipython", "ipywidgets", "anywidget", "numpy", "pydantic", "matplotlib", "nbclient")
"""The packages whose versions are in the table."""

LOAD_S = pytest.StashKey[dict[str, float]]()
"""By line of a cell, the median of the seconds that it takes in a new kernel."""


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the result of each use, and the counts of other tests by folder, into ``ENVIRONMENT_REPORT``."""
    reporter: Any = session.config.pluginmanager.get_plugin("terminalreporter")
    outcomes = {
        report.nodeid: outcome
        for outcome in ("passed", "skipped", "failed", "error")
        for report in reporter.stats.get(outcome, [])
    }
    uses: dict[str, str] = {}
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for name, outcome in outcomes.items():
        folder = "/".join(name.split("/")[:2])
        if folder == "tests/environments":
            uses[name.split("::")[-1].removeprefix("test_")] = outcome
        else:
            counts[folder][outcome] += 1
    facts = {
        "date": str(date.today()),
        "python": platform.python_version(),
        "versions": {name: metadata.version(name).split("+")[0] for name in SHOWN},
        "load_s": {line: round(value, 2) for line, value in session.config.stash.get(LOAD_S, {}).items()},
        "results": uses,
        "counts": counts,
    }
    Path(os.environ["ENVIRONMENT_REPORT"]).write_text(json.dumps(facts))
