"""Choice of a strategy by a forecast of its memory, if the option ``strategy`` is ``auto``.

Rank 0 computes the forecast and broadcasts the choice. By default a forecast is made only for models that could be too
large for a GPU; if ``strategy=auto`` or ``memory`` was given, for every model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from accel_nb.config import Resolved
from accel_nb.config.byte_sizes import bytes_of
from accel_nb.config.schema import OPTIONS
from accel_nb.data.loader import BatchSizeMeaning
from accel_nb.errors import ConfigError
from accel_nb.forecast.layouts import CHECKPOINTING, LAYOUTS
from accel_nb.forecast.model_building import forecast_model, sample_of
from accel_nb.forecast.plans import USABLE_FRACTION, Plan, RunSetting
from accel_nb.forecast.strategy_support import check_refusals
from accel_nb.forecast.table import explain
from accel_nb.runtime.devices.registry import device_type
from accel_nb.runtime.distributed.communicator import Communicator
from accel_nb.runtime.tensors.nested import find_tensors
from accel_nb.strategies.registry import StrategyRegistry

SMALL_BYTES = 1 << 28
"""For models with fewer bytes of weights no forecast is made unless requested: they fit on every common device."""

ROUGH_SHARE = 0.5
"""If weights, gradients and optimizer state fill at most this share of a device, activations are assumed to fit too."""

_CHECKPOINTING = next(iter(CHECKPOINTING))
_PLANNED = {name for layout in LAYOUTS for name in layout.options} - {"strategy"}


@dataclass(frozen=True, slots=True)
class StrategyChoice:
    """The options to train with, by their dotted names, and one line with the reason."""

    options: Mapping[str, Any]
    reason: str


class StrategyPlanner:
    """Chooses the strategy of one accelerator; every rank must make the same calls."""

    def __init__(
        self, resolved: Resolved, comm: Communicator, device: torch.device, precision: str, registry: StrategyRegistry
    ) -> None:
        self._resolved = resolved
        self._comm = comm
        self._device = device
        self._precision = precision
        self._registry = registry

    @property
    def is_requested(self) -> bool:
        """Whether the user has requested a forecast by setting ``strategy`` or ``memory``."""
        given = self._resolved.origins
        return any(given[name].layer != "default" for name in ("strategy", "memory"))

    def choose(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        loaders: Sequence[DataLoader[Any]],
        batch: BatchSizeMeaning,
    ) -> StrategyChoice | None:
        """Return the cheapest choice that fits; None if only the number of workers and devices should decide.

        Raises `ConfigError`, on every rank, if a forecast was requested and nothing fits.
        """
        if not self.is_requested and (device_type(self._device).is_host or _weight_bytes(models) < SMALL_BYTES):
            return None
        free = self._usable_bytes(models, optimizers)
        decision = self._comm.broadcast_json(
            self._decide(models, optimizers, loaders, batch, free) if self._comm.world.is_main else None
        )
        if decision is None:
            return None
        if decision["options"] is None:
            raise ConfigError(
                f"{decision['line']}; strategy auto from {self._resolved.origins['strategy']} does not start a "
                "training that will not fit: name a strategy to try it anyway"
            )
        return StrategyChoice(decision["options"], decision["line"])

    def _decide(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        loaders: Sequence[DataLoader[Any]],
        batch: BatchSizeMeaning,
        free: int,
    ) -> dict[str, Any] | None:
        """Return the options (None if nothing fits) and a line with the reason; None if no forecast is needed."""
        model = models[0] if len(models) == 1 else nn.ModuleList(models)
        sizes: dict[str, Any] = {"optimizer": optimizers} if optimizers else {}
        setting = self._setting(free)
        try:
            if not self.is_requested:
                rough = forecast_model(model, setting, **sizes)
                if rough.plans[0].usage.total <= ROUGH_SHARE * setting.device_bytes:
                    return None
            size, example = _read_example(loaders)
            share = -(-size // setting.world) if batch == "global" else size
            found = forecast_model(
                model, replace(setting, batch_size=size, samples_per_rank=share), **sizes, batch=example
            )
            found = replace(found, plans=self._filter_plans(found.plans))
            found = check_refusals(found, models, optimizers, self._resolved.config, self._registry)
            line = "; ".join([explain(found).removeprefix("-> "), *found.notes])
        except Exception as error:  # a model that fails on fake tensors may still train, and the other ranks wait
            return {"options": {}, "line": f"no plan: {type(error).__name__}: {error}"} if self.is_requested else None
        if found.best is not None:
            return {"options": found.best.options, "line": f"plan {line}"}
        return {"options": None if self.is_requested else {}, "line": line}

    def _filter_plans(self, plans: Sequence[Plan]) -> tuple[Plan, ...]:
        """Return the plans that can run here and do not contradict a given option."""
        given = self._resolved.given
        is_checkpointed = given.get(_CHECKPOINTING)
        if is_checkpointed and not any(plan.is_checkpointed for plan in plans):  # the model has no repeated blocks
            is_checkpointed = None
        return tuple(
            plan
            for plan in plans
            if not plan.is_supported
            or (self._is_available(str(plan.layout.options["strategy"])) and _agrees(plan, given, is_checkpointed))
        )

    def _is_available(self, strategy: str) -> bool:
        return strategy in self._registry.names and self._registry.get(strategy).capabilities.fits(self._comm.world)

    def _setting(self, free: int) -> RunSetting:
        world = self._comm.world
        return RunSetting(
            world=world.size,
            devices=f"{world.size} {self._device.type}",
            device_bytes=int(free * USABLE_FRACTION),
            host_bytes=int(device_type("cpu").memory("cpu").free * USABLE_FRACTION),
            precision=self._precision,
            uses_host_memory=device_type(self._device).is_host,
            ranks_per_replica=self._resolved.config.fsdp.hybrid_shard_size,
        )

    def _usable_bytes(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> int:
        """Return the bytes that a device can use: the option ``memory``, or the least free memory of all ranks."""
        if self._resolved.config.memory is not None:
            return bytes_of(self._resolved.config.memory)
        kind = device_type(self._device)
        found = kind.memory(self._device)
        free = found.free // (self._comm.world.local_size if kind.is_host else 1)
        if not kind.is_host:  # memory of this training's objects, and torch's cache, can be used too
            free += found.reserved - found.allocated + _training_bytes(self._device, models, optimizers)
        return int(self._comm.all_reduce(torch.tensor([free], device="cpu"), "min"))


def _agrees(plan: Plan, given: Mapping[str, Any], is_checkpointed: bool | None) -> bool:
    """Return whether a plan does not contradict the given options."""
    strategy = plan.layout.options["strategy"]
    own = (name for name in _PLANNED & given.keys() if OPTIONS[name].section in (strategy, None))
    return (is_checkpointed is None or plan.is_checkpointed == is_checkpointed) and all(
        plan.layout.options.get(name, OPTIONS[name].default) == given[name] for name in own if name != _CHECKPOINTING
    )


def _weight_bytes(models: Sequence[nn.Module]) -> int:
    return sum(value.nbytes for model in models for value in model.parameters())


def _training_bytes(device: torch.device, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> int:
    weights = [value for model in models for value in (*model.parameters(), *model.buffers())]
    gradients = [value.grad for value in weights if value.grad is not None]
    states = [value for item in optimizers for value in find_tensors(item.state)]
    return sum(value.nbytes for value in (*weights, *gradients, *states) if value.device == device)


def _read_example(loaders: Sequence[DataLoader[Any]]) -> tuple[int, Any]:
    """Return the batch size of the only loader, and a batch of one sample; 0 and None unless there is exactly one.

    An iterable dataset is not read, since the training would then miss its first samples.
    """
    if len(loaders) != 1 or isinstance(loaders[0].dataset, IterableDataset):
        return 0, None
    example, size = sample_of(loaders[0])
    return (size or 0), example
