"""The base class of dataclasses of options."""

from __future__ import annotations

import copy
from dataclasses import MISSING, fields
from typing import Any


class KwargsHandler:
    """Base class of dataclasses of options; fields may be assigned until an `Accelerator` is built with the object."""

    def to_dict(self) -> dict[str, Any]:
        """Return all fields by name, copied."""
        return {item.name: copy.deepcopy(getattr(self, item.name)) for item in fields(self)}  # pyright: ignore[reportArgumentType]

    def to_kwargs(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults, by name."""
        given: dict[str, Any] = {}
        for item in fields(self):  # pyright: ignore[reportArgumentType]
            default = item.default_factory() if item.default_factory is not MISSING else item.default
            value = getattr(self, item.name)
            if value is not default and value != default:
                given[item.name] = copy.deepcopy(value)
        return given
