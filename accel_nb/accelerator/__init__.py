"""The training API: one object that brings models, optimizers and loaders to every device."""

from accel_nb.accelerator.core import Accelerator as Accelerator
from accel_nb.accelerator.options.plugins import DataLoaderConfiguration as DataLoaderConfiguration
