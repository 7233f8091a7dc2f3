"""The requirements of accel_nb that installed packages do not meet, by their metadata; imports none of them."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata

from packaging.requirements import Requirement


def unmet_requirements() -> list[str]:
    """Return one line for each package that is missing or of an unsupported version, with the ``pip`` command."""
    return list(_unmet(metadata.requires("accel_nb") or []))


def _unmet(requirements: list[str]) -> Iterator[str]:
    for requirement in map(Requirement, requirements):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            found = "it is not installed"
        else:
            if requirement.specifier.contains(version, prereleases=True):
                continue
            found = f"{version} is installed"
        needed = f"{requirement.name}{requirement.specifier}"
        yield f"accel_nb needs {needed}, and {found}: pip install '{needed}'"
