"""The options of a run: one schema, layers with origins, flags, the YAML file. Imports without torch."""

from accel_nb.config.files import write_file
from accel_nb.config.flags import flags_to_line, parse_flags, usage
from accel_nb.config.layers import (
    Layer,
    Origin,
    Resolved,
    Row,
    ambient_config,
    ambient_layers,
    environment_layer,
    giving_way,
    read_file,
    resolve,
    using_layers,
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
    "ambient_config",
    "ambient_layers",
    "environment_layer",
    "flags_to_line",
    "giving_way",
    "parse_flags",
    "read_file",
    "resolve",
    "using_layers",
    "usage",
    "write_file",
]
