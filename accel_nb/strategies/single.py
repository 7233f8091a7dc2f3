"""Strategy for one process with one device."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from accel_nb.precision.forward import forward_in_precision
from accel_nb.runtime.distributed.communicator import Communicator
from accel_nb.runtime.tensors.instance_patching import replace_forward, restore_forward
from accel_nb.runtime.world import World
from accel_nb.strategies.base import Bundle, Capabilities, ReplicaStrategy, multiply_gradients


class Single(ReplicaStrategy):
    """Trains as plain PyTorch does; a model is changed only if the precision needs it."""

    name: ClassVar[str] = "single"
    capabilities: ClassVar[Capabilities] = Capabilities(max_world=1, priority=100)

    def open(self, world: World, comm: Communicator) -> None:
        """Start with no wrapped models; the world has one rank."""
        self._wrapped: dict[int, nn.Module] = {}

    def model_init(self) -> AbstractContextManager[Any]:
        """Return a context that changes nothing."""
        return nullcontext()

    def wrap(self, bundle: Bundle) -> Bundle:
        """Make the forward passes of models compute in the precision's dtype."""
        if self.precision.policy.compute is not None:
            for model in bundle.models:
                if id(model) not in self._wrapped:
                    self._wrapped[id(model)] = replace_forward(model, forward_in_precision(model, self.precision))
        return bundle

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Restore the class of the model."""
        if self._wrapped.pop(id(model), None) is not None:
            restore_forward(model)
        return model

    def data_coords(self) -> tuple[int, int]:
        """Return share 0 of 1: this rank reads all data."""
        return 0, 1

    def grad_sync(self, model: nn.Module, enabled: bool) -> None:
        """Do nothing: there are no other ranks."""

    def keep_local(self, model: nn.Module, enabled: bool) -> None:
        """Do nothing: there are no other ranks."""

    def backward(
        self,
        loss: Tensor,
        bundle: Bundle,
        *,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Sequence[Tensor] | None = None,
    ) -> None:
        """Compute gradients of the scaled loss."""
        torch.autograd.backward(self.precision.scale(loss), None, retain_graph, create_graph, inputs=inputs)

    def finish_gradients(self, bundle: Bundle, factor: float | Tensor) -> None:
        """Multiply the gradients by ``factor``."""
        multiply_gradients(bundle, factor)

    def describe(self) -> dict[str, Any]:
        """Return an empty dict: the receipt shows nothing more."""
        return {}

    def close(self) -> None:
        """Unwrap every model."""
        for model in list(self._wrapped.values()):
            self.unwrap(model)
