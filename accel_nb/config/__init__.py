"""The options of a run: one schema, layers with origins, flags, the YAML file. Imports no torch.

Names are imported on first use, to avoid an import cycle: the schema imports packages that declare options for their
strategies, and such a package imports ``accel_nb.config.sections``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel_nb.config.files import write_file
    from accel_nb.config.flags import flags_to_line, parse_flags, usage
    from accel_nb.config.layers import (
        Layer,
        Origin,
        Resolved,
        Row,
        check_layer,
        current_config,
        current_layers,
        environment_layer,
        read_file,
        resolve,
        using_layers,
        without_overridden,
    )
    from accel_nb.config.schema import OPTIONS, Config, Option
    from accel_nb.config.sections import DdpOptions

__all__ = [
    "OPTIONS",
    "Config",
    "DdpOptions",
    "Layer",
    "Option",
    "Origin",
    "Resolved",
    "Row",
    "check_layer",
    "current_config",
    "current_layers",
    "environment_layer",
    "flags_to_line",
    "without_overridden",
    "parse_flags",
    "read_file",
    "resolve",
    "using_layers",
    "usage",
    "write_file",
]

_MODULES = {
    "files": ("write_file",),
    "flags": ("flags_to_line", "parse_flags", "usage"),
    "schema": ("OPTIONS", "Config", "Option"),
    "sections": ("DdpOptions",),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES.get(name, 'layers')}"), name)
    globals()[name] = value
    return value
