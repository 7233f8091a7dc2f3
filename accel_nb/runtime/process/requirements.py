"""The requirements of accel_nb that the installed packages do not meet, from the metadata. Imports none of them."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata

from packaging.requirements import Requirement


def unmet_requirements() -> list[str]:
    """Return one line for each package that is missing or has a version that is not supported, with the remedy."""
    return list(_unmet(metadata.requires("accel_nb") or []))


def _unmet(requirements: list[str]) -> Iterator[str]:
    for wanted in map(Requirement, requirements):
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        try:
            version = metadata.version(wanted.name)
        except metadata.PackageNotFoundError:
            found = "it is not installed"
        else:
            if wanted.specifier.contains(version, prereleases=True):
                continue
            found = f"{version} is installed"
        needed = f"{wanted.name}{wanted.specifier}"
        yield f"accel_nb needs {needed}, and {found}: pip install '{needed}'"
