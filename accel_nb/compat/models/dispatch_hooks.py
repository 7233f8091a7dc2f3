"""Hooks by which libraries load and change the offloaded weights of one module of a dispatched model.

`accel_nb.dispatch_model` itself needs none. PEFT looks for accelerate's hook before it merges an adapter: without one
it would write to the placeholder of the weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from accel_nb.bigmodel.meta import clone_parameter_onto
from accel_nb.bigmodel.offload.dispatch import DispatchRecord, ModuleWeights, get_dispatch_record, read_weight
from accel_nb.bigmodel.offload.weight_prefetch import OffloadedWeight
from accel_nb.compat.models.align_hooks import AlignDevicesHook


def attach_dispatch_hooks(model: nn.Module) -> None:
    """Attach a hook to each module of a dispatched model that has offloaded weights of its own."""
    record = get_dispatch_record(model)
    for module, offloaded in record.modules.items():
        vars(module)["_hf_hook"] = DispatchHook(record, offloaded)


class DispatchHook(AlignDevicesHook):
    """Loads the weights of a module, on the model's main device, between `pre_forward` and `post_forward`.

    The module's forward does so by itself. Weights that are assigned to ``weights_map`` meanwhile take the place of the
    offloaded ones, in host memory.
    """

    def __init__(self, record: DispatchRecord, offloaded: ModuleWeights) -> None:
        assert record.prefetcher is not None, "a model with offloaded weights has a prefetcher"
        super().__init__(record.prefetcher.device, offload=True, weights_map=_Weights(offloaded.weights))
        self.original_devices = {name: weight.placeholder.device for name, weight in offloaded.weights.items()}
        self._prefetcher, self._group, self._weights = record.prefetcher, offloaded.groups[0], offloaded.weights

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Change nothing: the weights are offloaded already."""
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Load the weights."""
        self._prefetcher.acquire(self._group)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Unload the weights, and keep those that were assigned to ``weights_map``."""
        given: Mapping[str, Tensor] = self.weights_map or {}
        if not isinstance(given, _Weights):
            for name, value in given.items():
                if (weight := self._weights.get(name)) is not None:
                    _install(weight, value)
            self.weights_map = _Weights(self._weights)
        self._prefetcher.release(self._group)
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Change nothing: `remove_hook_from_submodules` loads the weights of the whole model."""
        return module


class _Weights(Mapping[str, Tensor]):
    """The values of offloaded weights by name, each read from its source when it is looked up."""

    def __init__(self, weights: Mapping[str, OffloadedWeight]) -> None:
        self._weights = weights

    def __getitem__(self, name: str) -> Tensor:
        return read_weight(self._weights[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def _install(weight: OffloadedWeight, value: Tensor) -> None:
    """Put another value in place of a loaded weight; the prefetcher keeps it when it unloads the weight."""
    placeholder, offloaded = weight.placeholder, value.detach()
    if isinstance(placeholder, nn.Parameter):
        offloaded = clone_parameter_onto(placeholder, offloaded).requires_grad_(False)
    for holder, leaf in weight.holders:
        holder[leaf] = offloaded
