"""Options of strategies that other packages install.

A package names the section of its strategy's options in the entry-point group ``accel_nb.options``, under the name of
the strategy. The section's module must import without torch, and nothing else of the strategy is imported.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection
from functools import cache
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from typing import Any, TypeVar

from pydantic import Field, create_model

from accel_nb.config.sections import Section

STRATEGY_GROUP = "accel_nb.strategies"
"""The entry points under which strategies are installed."""

OPTIONS_GROUP = "accel_nb.options"
"""The entry points under which sections of options for strategies are installed."""

S = TypeVar("S", bound=Section)


@cache
def _all_points() -> Any:
    """Return every entry point. Reading them opens a file of each installed package: once for a process is enough."""
    return entry_points()


def installed_entry_points(group: str) -> EntryPoints:
    """Return the entry points of a group."""
    return _all_points().select(group=group)


def with_installed_sections(base: type[S], taken: Collection[str]) -> type[S]:
    """Return ``base`` with a field for each installed section; ``taken`` are names that no section may have.

    A section that cannot be used is left out with a warning: a package that is broken must not break each import.
    """
    fields: dict[str, Any] = {}
    for point in installed_entry_points(OPTIONS_GROUP):
        try:
            fields[point.name] = _section(point, {*base.model_fields, *taken, *fields})
        except Exception as error:  # whatever importing another package's module raises
            warnings.warn(
                f"the options of strategy {point.name!r} ({point.value}) are left out: {type(error).__name__}: {error}",
                stacklevel=2,
            )
    return create_model(base.__name__, __base__=base, __module__=base.__module__, **fields) if fields else base


def _section(point: EntryPoint, taken: Collection[str]) -> tuple[type[Section], object]:
    """Return the type and the field of an installed section."""
    if not point.name.isidentifier() or point.name in taken:
        raise ValueError("the name must be a Python name that is not the name of another option")
    found = point.load()
    if not (isinstance(found, type) and issubclass(found, Section)):
        raise TypeError(f"{point.value} must be a subclass of accel_nb.config.sections.Section")
    summary = (found.__doc__ or f"Options of the strategy {point.name}.").partition("\n")[0]
    return found, Field(default_factory=found, description=summary)
