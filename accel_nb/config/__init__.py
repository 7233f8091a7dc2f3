"""The options of a run: one schema, layers with origins, flags, the YAML file. Imports without torch."""

from accel_nb.config.files import read_file as read_file
from accel_nb.config.files import write_file as write_file
from accel_nb.config.flags import flags_to_line as flags_to_line
from accel_nb.config.flags import parse_flags as parse_flags
from accel_nb.config.flags import usage as usage
from accel_nb.config.layers import Layer as Layer
from accel_nb.config.layers import Origin as Origin
from accel_nb.config.layers import Resolved as Resolved
from accel_nb.config.layers import Row as Row
from accel_nb.config.layers import ambient_config as ambient_config
from accel_nb.config.layers import ambient_layers as ambient_layers
from accel_nb.config.layers import environment_layer as environment_layer
from accel_nb.config.layers import giving_way as giving_way
from accel_nb.config.layers import resolve as resolve
from accel_nb.config.layers import using_layers as using_layers
from accel_nb.config.schema import OPTIONS as OPTIONS
from accel_nb.config.schema import Config as Config
from accel_nb.config.schema import Option as Option
from accel_nb.config.sections import DdpOptions as DdpOptions
