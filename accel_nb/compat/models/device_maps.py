"""Device maps as accelerate plans them: the devices are filled in order, and a module that does not fit is split.

`accel_nb.infer_auto_device_map` plans in another way, which also weighs the time of transfers.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from accel_nb.accelerator.process.logging import get_logger
from accel_nb.bigmodel.planning.module_tree import ModuleTree
from accel_nb.bigmodel.planning.sizes import Device, list_tensors
from accel_nb.compat.models.module_sizes import clean_device_map, get_max_memory
from accel_nb.config.byte_sizes import size_text
from accel_nb.errors import ConfigError


def infer_auto_device_map(
    model: nn.Module,
    max_memory: Mapping[Device, int | str] | None = None,
    no_split_module_classes: Collection[str] | str | None = None,
    dtype: torch.dtype | str | None = None,
    special_dtypes: Mapping[str, torch.dtype | str] | None = None,
    verbose: bool = False,
    clean_result: bool = True,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
) -> dict[str, Device]:
    """Plan the place of each part of a model: the devices of ``max_memory`` in their order, then ``disk``.

    A module that does not fit is split into its parts, unless its class is in ``no_split_module_classes``. Parts that
    share a tensor are placed together, and the tensor counts once. The first accelerator, and the CPU, keep memory free
    for the largest part that is not placed yet. With ``fallback_allocation`` a device on which the next part does not
    fit, and which has none so far, receives the first part that does.

    Warns about a device that receives nothing, and, without ``offload_buffers``, about buffers of offloaded parts that
    no accelerator has memory for. Raises `ConfigError` if a limit of ``disk`` is too low.
    """
    limits = get_max_memory(max_memory)
    classes = [no_split_module_classes] if isinstance(no_split_module_classes, str) else no_split_module_classes or ()
    tree = ModuleTree(model, list_tensors(model, dtype, special_dtypes), classes)
    plan = _Plan(tree, {**limits, "disk": limits.get("disk", math.inf)})
    for device in plan.free_bytes:
        plan.fill(device, has_fallback=fallback_allocation)
    if plan.waiting:
        raise ConfigError(
            f"max_memory['disk'] is {size_text(limits['disk'])}, which is less than the parts that remain; raise it"
        )
    _warn_of_unused(plan)
    if not offload_buffers:
        _warn_of_buffers(plan)
    if verbose:
        for part, device in plan.places.items():
            print(f"{part or 'the model'}: {device}, {size_text(tree.nbytes(tree.tensor_indices(part)))}")
    return clean_device_map(plan.places) if clean_result else plan.places


@dataclass
class _Plan:
    """Places of parts, in the order of the model, and the memory that is left on each device."""

    tree: ModuleTree
    free_bytes: dict[Device, float]
    places: dict[str, Device] = field(default_factory=dict)
    placed: set[int] = field(default_factory=set)
    """Indices of the tensors that have a place."""

    def __post_init__(self) -> None:
        self.accelerators = [device for device in self.free_bytes if str(device) not in ("cpu", "disk")]
        usable = [device for device in self.accelerators if self.free_bytes[device] > 0]
        self.reserving = {"cpu", *usable[:1]}
        self.waiting = deque(self.tree.children("") or [""])
        if not self.tree.tensors:
            self.waiting.clear()
            self.places[""] = next(iter(self.free_bytes))
        leaves = {part: self.tree.tensor_indices(part) for part in self.tree.leaf_parts("")}
        self.by_size = sorted(
            ((self.tree.nbytes(tensors), tensors) for tensors in leaves.values()), key=lambda leaf: -leaf[0]
        )

    def fill(self, device: Device, *, has_fallback: bool) -> None:
        """Place waiting parts on a device until the next one does not fit."""
        is_used = False
        while self.waiting:
            part = self.waiting[0]
            if part in self.places:
                self.waiting.popleft()
            elif not self._has_placed_tensors(part) and self._place_if_fits(part, device):
                is_used = True
            elif parts := self.tree.children(part):
                self.waiting.popleft()
                self.waiting.extendleft(reversed(parts))
            elif has_fallback and not is_used and self._place_first_fitting(device):
                is_used = True
            else:
                return

    def _place_first_fitting(self, device: Device) -> bool:
        for part in list(self.waiting):
            for small in [part, *self.tree.leaf_parts(part)]:
                if not self._has_placed_tensors(small) and self._place_if_fits(small, device):
                    return True
        return False

    def _place_if_fits(self, part: str, device: Device) -> bool:
        """Place a part, with those that share tensors with it, if the device has memory for them."""
        parts_together = self.tree.parts_sharing_tensors(part)
        tensors = {index for name in parts_together for index in self.tree.tensor_indices(name)}
        needed = self.tree.nbytes(tensors)
        reserved = self.largest(self.placed | tensors) if device in self.reserving else 0
        if needed + reserved > self.free_bytes[device]:
            return False
        self.free_bytes[device] -= needed
        self.placed |= tensors
        self.places.update(dict.fromkeys(sorted(parts_together, key=lambda name: (name != part, name)), device))
        return True

    def _has_placed_tensors(self, part: str) -> bool:
        return not self.placed.isdisjoint(self.tree.tensor_indices(part))

    def largest(self, without: set[int]) -> int:
        """Return the size of the largest part that contains no tensor of ``without``."""
        return next((size for size, tensors in self.by_size if tensors.isdisjoint(without)), 0)

    def indices_on(self, devices: Iterable[Device]) -> set[int]:
        """Return the indices of the tensors on some devices."""
        wanted = {str(device) for device in devices}
        parts = [part for part, device in self.places.items() if str(device) in wanted]
        return {index for part in parts for index in self.tree.tensor_indices(part)}


def _warn_of_unused(plan: _Plan) -> None:
    """Log the devices that received nothing although parts were placed on later ones."""
    order = [device for device, free_bytes in plan.free_bytes.items() if free_bytes > 0]
    used = [at for at, device in enumerate(order) if device in plan.places.values()]
    if unused := [device for device in order[: max(used, default=0)] if device not in plan.places.values()]:
        get_logger(__name__).warning(
            f"nothing is placed on {', '.join(map(repr, unused))}: insufficient memory for the next part and for the "
            "largest one that may be brought back; raise max_memory, or pass fallback_allocation=True"
        )


def _warn_of_buffers(plan: _Plan) -> None:
    """Warn if no accelerator has memory for all buffers of offloaded parts, which stay on the one that computes."""
    offloaded = plan.indices_on(("cpu", "disk"))
    needed = plan.tree.nbytes(index for index in offloaded if plan.tree.tensors[index].is_buffer)
    if not plan.accelerators or not needed:
        return
    reserved = plan.largest(set(range(len(plan.tree.tensors))) - offloaded)
    free = [plan.free_bytes[device] - (reserved if device in plan.reserving else 0) for device in plan.accelerators]
    if max(free) < needed:
        warnings.warn(
            f"the buffers of offloaded parts take {size_text(needed)} of a device's memory, and none has that "
            "beside its own parts; with offload_buffers=True they are offloaded too",
            stacklevel=3,
        )
