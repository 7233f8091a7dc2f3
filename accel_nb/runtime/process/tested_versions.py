"""The versions of packages that accel_nb was tested with, from a file that the tests of environments write."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

from packaging.version import Version

_FILE = Path(__file__).with_suffix(".json")


def tested_versions() -> dict[str, list[str]]:
    """Return the tested versions of each package, lowest first."""
    return json.loads(_FILE.read_text(encoding="utf-8"))


def newer_than_tested(name: str) -> str | None:
    """Return advice if the installed minor version of a package is newer than all tested ones; else None."""
    try:
        installed = Version(metadata.version(name))
    except metadata.PackageNotFoundError:
        return None
    newest = tested_versions()[name][-1]
    if installed.release[:2] <= Version(newest).release[:2]:
        return None
    return (
        f"{name} {installed} is newer than the newest tested version: if something fails, install {name} {newest} "
        f"(`pip install {name}=={newest}`)"
    )
