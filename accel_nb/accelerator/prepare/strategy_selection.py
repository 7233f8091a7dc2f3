"""The strategy of an accelerator: selected for its world, and again for its first models if the option is ``auto``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from accel_nb.accelerator.prepare.activation_checkpointing import ActivationCheckpointer
from accel_nb.accelerator.prepare.preparer import ObjectsByKind
from accel_nb.accelerator.prepare.strategy_choice import StrategyPlanner
from accel_nb.accelerator.training.stepper import Stepper
from accel_nb.config import Resolved
from accel_nb.data.loader import BatchSizeMeaning
from accel_nb.runtime.distributed.communicator import Communicator
from accel_nb.strategies import Strategy, StrategyRegistry, choose
from accel_nb.strategies.choice import AUTO, with_options


class StrategySelection:
    """Selects the strategy for the first models, before any of them is prepared."""

    def __init__(
        self,
        strategy: Strategy,
        resolved: Resolved,
        comm: Communicator,
        device: torch.device,
        registry: StrategyRegistry,
    ) -> None:
        self.line: str | None = None
        """What was selected and why, for the receipt; None if no forecast was made."""
        self._resolved = resolved
        self._comm = comm
        self._registry = registry
        self._planner: StrategyPlanner | None = None
        mesh = resolved.config.mesh
        is_data_parallel = max(mesh.tp, mesh.pp, mesh.cp, mesh.ep) == 1  # a forecast chooses no mesh
        if resolved.config.strategy == AUTO and is_data_parallel:
            self._planner = StrategyPlanner(resolved, comm, device, strategy.precision.policy.name, registry)
        self._selected: Mapping[str, Any] = {"strategy": strategy.name}

    def select(
        self, objects: Sequence[Any], batch: BatchSizeMeaning, stepper: Stepper, recomputer: ActivationCheckpointer
    ) -> None:
        """Select the strategy for the first models among ``objects``; every rank must call."""
        if self._planner is None or stepper.bundle.models or stepper.bundle.optimizers:
            return
        kinds = ObjectsByKind.sort(objects)
        if not kinds.models:
            return
        choice = self._planner.choose(kinds.outermost_models(), kinds.optimizers, kinds.loaders, batch)
        self.line = None if choice is None else choice.reason
        base = choose(AUTO, self._comm.world, self._registry).name
        options = {"strategy": base, **({} if choice is None else choice.options)}
        if options == self._selected:
            return
        self._selected = options
        config = with_options(self._resolved.config, options)
        before = stepper.strategy
        before.close()
        strategy = self._registry.get(config.strategy)(getattr(config, config.strategy, None), before.precision)
        strategy.open(self._comm.world, self._comm)
        stepper.set_strategy(strategy)
        recomputer.is_on = config.activation_checkpointing
