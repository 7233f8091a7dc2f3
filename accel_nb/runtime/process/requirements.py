"""Check of the requirements of accel_nb by the metadata of installed packages; imports none of them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib import metadata

from packaging.requirements import Requirement


def unmet_requirements() -> list[str]:
    """Return one line for each package that is missing or of an unsupported version, with the ``pip`` command."""
    return list(_unmet(metadata.requires("accel_nb") or []))


@cache
def unmet_extra(extra: str, package: str) -> str | None:
    """Return the reason if a package of an extra cannot be used, with the ``pip`` command; None if it can."""
    for requirement in map(Requirement, metadata.requires("accel_nb") or []):
        is_of_extra = requirement.marker is not None and requirement.marker.evaluate({"extra": extra})
        if requirement.name == package and is_of_extra and (found := _unsuitable(requirement)) is not None:
            return f"{package}{requirement.specifier} is needed, and {found}: pip install 'accel_nb[{extra}]'"
    return None


def _unmet(requirements: list[str]) -> Iterator[str]:
    for requirement in map(Requirement, requirements):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        if (found := _unsuitable(requirement)) is not None:
            needed = f"{requirement.name}{requirement.specifier}"
            yield f"accel_nb needs {needed}, and {found}: pip install '{needed}'"


def _unsuitable(requirement: Requirement) -> str | None:
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return "it is not installed"
    return None if requirement.specifier.contains(version, prereleases=True) else f"{version} is installed"
