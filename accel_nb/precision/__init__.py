"""Number formats: what is computed in which dtype, and how losses are scaled."""

from accel_nb.precision.half import build_precision
from accel_nb.precision.policy import Precision, PrecisionPolicy

__all__ = ["Precision", "PrecisionPolicy", "build_precision"]
