"""Number formats: what is computed in which dtype, and how losses are scaled."""

from accel_nb.precision.half import build_precision as build_precision
from accel_nb.precision.policy import Precision as Precision
from accel_nb.precision.policy import PrecisionPolicy as PrecisionPolicy
