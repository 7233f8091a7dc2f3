"""Precision of training: the dtypes of weights, computation and gradients, and loss scaling."""

from accel_nb.precision.half import build_precision as build_precision
from accel_nb.precision.policy import Precision as Precision
from accel_nb.precision.policy import PrecisionPolicy as PrecisionPolicy
