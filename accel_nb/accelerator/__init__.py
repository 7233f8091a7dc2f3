"""The training API: one object that brings models, optimizers and loaders to every device."""

from accel_nb.accelerator.core import Accelerator

__all__ = ["Accelerator"]
