"""Objects for the argument ``kwargs_handlers``, with accelerate's methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from accel_nb.accelerator.options import plugins
from accel_nb.accelerator.training.profiling import torch_profiler
from accel_nb.config.layers import Layer, resolve
from accel_nb.strategies.ddp.comm_hooks import register_hook


@dataclass
class ProfileKwargs(plugins.ProfileKwargs):
    """Options of a profiler."""

    def build(self) -> torch.profiler.profile:
        """Return torch's profiler with these options; `Accelerator.profile` also writes its traces."""
        return torch_profiler(self, self.on_trace_ready)


@dataclass
class DistributedDataParallelKwargs(plugins.DistributedDataParallelKwargs):
    """Options of PyTorch's DistributedDataParallel."""

    def to_dict(
        self, ignore_keys: Sequence[str] = ("comm_hook", "comm_wrapper", "comm_state_option")
    ) -> dict[str, Any]:
        """Return all fields by name, copied, apart from those of hooks."""
        return {name: value for name, value in super().to_dict().items() if name not in ignore_keys}

    def register_comm_hook(self, model: DistributedDataParallel) -> None:
        """Register the hook that compresses gradients on a model that a program has wrapped itself."""
        options = resolve([Layer("code", self.as_options(), type(self).__name__)]).config.ddp
        if options.comm_hook != "no":
            register_hook(model, options)


HANDLER_NAMES: Mapping[str, str] = {
    "DistributedDataParallelKwargs": "ddp_handler",
    "GradScalerKwargs": "scaler_handler",
    "InitProcessGroupKwargs": "init_handler",
    "AutocastKwargs": "autocast_handler",
    "ProfileKwargs": "profile_handler",
    "AORecipeKwargs": "ao_recipe_handler",
}
"""For each class of handlers the attribute of an `Accelerator` that has the handler."""

REFUSED_HANDLERS = ("fp8_recipe_handler", "te_recipe_handler", "msamp_recipe_handler")
"""Attributes for handlers that cannot be built here: always None, since programs read them."""
