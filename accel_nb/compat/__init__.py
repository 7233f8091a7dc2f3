"""``import accelerate`` finds ours: code that was written for the well-known package runs unchanged in this process.

`install` puts a finder in front of Python's own, `uninstall` takes it away. What is offered are names, in the modules
where people import them from; behind each stands an object of accel_nb. Names that are not offered can be imported,
since libraries import many that they do not use: to use one raises an error that says which part would serve it.
"""

from accel_nb.compat.finder import COMPATIBLE_VERSION as COMPATIBLE_VERSION
from accel_nb.compat.finder import install as install
from accel_nb.compat.finder import is_installed as is_installed
from accel_nb.compat.finder import uninstall as uninstall
