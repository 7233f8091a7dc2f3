"""Options of strategies that other packages install.

A package declares its strategy's options as an entry point in the group ``accel_nb.options``, whose name is the
strategy's and whose value is a `Section`. The section's module must not import torch or other parts of the strategy.
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
"""The group of entry points by which packages add strategies."""

ENGINE_GROUP = "accel_nb.engines"
"""The group of entry points by which packages add engines."""

OPTIONS_GROUP = "accel_nb.options"
"""The group of entry points by which packages add sections of options for strategies."""

S = TypeVar("S", bound=Section)


@cache
def _all_entry_points() -> Any:
    """Return every entry point; cached, since reading them opens a file of each installed package."""
    return entry_points()


@cache
def installed_entry_points(group: str) -> EntryPoints:
    """Return the entry points of a group."""
    return _all_entry_points().select(group=group)


def with_installed_sections(base: type[S], reserved: Collection[str]) -> type[S]:
    """Return ``base`` with a field for each installed section; ``reserved`` are names that a section must not have.

    A section that cannot be used is left out with a warning, since a broken package must not break all imports.
    """
    fields: dict[str, Any] = {}
    for point in installed_entry_points(OPTIONS_GROUP):
        try:
            fields[point.name] = _section(point, {*base.model_fields, *reserved, *fields})
        except Exception as error:  # importing another package's module may raise any exception
            warnings.warn(
                f"the options of strategy {point.name!r} ({point.value}) are left out: {type(error).__name__}: {error}",
                stacklevel=2,
            )
    return create_model(base.__name__, __base__=base, __module__=base.__module__, **fields) if fields else base


def _section(point: EntryPoint, reserved: Collection[str]) -> tuple[type[Section], object]:
    """Return the class and the field of an installed section."""
    if not point.name.isidentifier() or point.name in reserved:
        raise ValueError("the name must be a Python name that is not the name of another option")
    section = point.load()
    if not (isinstance(section, type) and issubclass(section, Section)):
        raise TypeError(f"{point.value} must be a subclass of accel_nb.config.sections.Section")
    summary = (section.__doc__ or f"Options of the strategy {point.name}.").partition("\n")[0]
    return section, Field(default_factory=section, description=summary)
