"""Compatibility with ``accelerate``: after `install`, code written for that package runs on accel_nb unchanged.

`install` inserts an import finder before Python's own, `uninstall` removes it. The supported names are available in
accelerate's modules, each an object of accel_nb. Unsupported names can be imported, since libraries import many that
they do not use; using one raises an error with the alternative.
"""

from accel_nb.compat.names.finder import COMPATIBLE_VERSION as COMPATIBLE_VERSION
from accel_nb.compat.names.finder import install as install
from accel_nb.compat.names.finder import is_installed as is_installed
from accel_nb.compat.names.finder import uninstall as uninstall
