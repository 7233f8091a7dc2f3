"""Sizes of modules and memory of devices, with accelerate's names."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn

from accel_nb.bigmodel.planning import sizes
from accel_nb.bigmodel.planning.module_tree import is_within
from accel_nb.config.byte_sizes import read_bytes
from accel_nb.errors import ConfigError

_BLOCK_MARGIN = 1.25
"""The fraction of a block's size that is added to a balanced device's share, as blocks are placed as a whole."""


def convert_file_size_to_int(size: int | str) -> int:
    """Return ``"5GB"`` (10^9) or ``"5GiB"`` (2^30) as bytes; raises ValueError."""
    try:
        return read_bytes(size, "size")
    except ConfigError as error:
        raise ValueError(str(error)) from None


def compute_module_total_buffer_size(
    model: nn.Module,
    dtype: torch.dtype | str | None = None,
    special_dtypes: Mapping[str, torch.dtype | str] | None = None,
) -> int:
    """Return the bytes of all buffers of a model."""
    return sizes.compute_module_sizes(model, dtype, special_dtypes, buffers_only=True).get("", 0)


def get_module_leaves(module_sizes: Mapping[str, int]) -> list[str]:
    """Return the names that have no other name of the table below them."""
    parents = {name.rpartition(".")[0] for name in module_sizes if name}
    return [name for name in module_sizes if name not in parents]


def get_max_layer_size(
    modules: Sequence[tuple[str, nn.Module | torch.Tensor]],
    module_sizes: Mapping[str, int],
    no_split_module_classes: Collection[str] | None,
) -> tuple[int, list[str]]:
    """Return the size of the largest module that is not split, and the names of all modules of this size."""
    unsplit_classes = (
        {no_split_module_classes} if isinstance(no_split_module_classes, str) else {*(no_split_module_classes or ())}
    )
    found: dict[str, int] = {}
    waiting = list(modules)
    while waiting:
        name, module = waiting.pop(0)
        children = list(module.named_children()) if isinstance(module, nn.Module) else []
        if children and type(module).__name__ not in unsplit_classes:
            waiting += [(f"{name}.{child}" if name else child, part) for child, part in children]
        else:
            found[name] = module_sizes[name]
    largest = max(found.values(), default=0)
    return largest, [name for name, size in found.items() if size == largest]


def calculate_maximum_sizes(model: nn.Module) -> tuple[int, tuple[int, list[str]]]:
    """Return the bytes of a model, and those of its largest unsplit module with the names of modules of this size."""
    found = sizes.compute_module_sizes(model)
    unsplit_classes: Any = getattr(model, "_no_split_modules", None)
    return found[""], get_max_layer_size(list(model.named_children()), found, unsplit_classes)


def get_max_memory(max_memory: Mapping[Any, float | str] | None = None) -> dict[Any, int]:
    """Return the bytes that weights may take on each device: ``max_memory`` rounded down, or else the free memory.

    Strings in ``max_memory`` become numbers in place, as with accelerate: transformers computes with them afterwards.
    """
    if max_memory is None:
        return dict(sizes.get_max_memory())
    rounded = {device: int(size) if isinstance(size, float) else size for device, size in max_memory.items()}
    limits = dict(sizes.get_max_memory(rounded))
    if isinstance(max_memory, MutableMapping):
        max_memory.update({device: limits[device] for device, size in max_memory.items() if isinstance(size, str)})
    return limits


def get_balanced_memory(
    model: nn.Module,
    max_memory: Mapping[Any, int | str] | None = None,
    no_split_module_classes: Collection[str] | None = None,
    dtype: str | torch.dtype | None = None,
    special_dtypes: Mapping[str, torch.dtype | str] | None = None,
    low_zero: bool = False,
) -> dict[Any, int]:
    """Return limits that divide a model evenly among accelerators; the last one keeps its own limit.

    With ``low_zero`` the first gets only what the others cannot hold.
    """
    limits = get_max_memory(max_memory)
    devices = [device for device, limit in limits.items() if device not in ("cpu", "disk") and limit > 0]
    if len(devices) < 2:
        return limits
    found = sizes.compute_module_sizes(model, dtype, special_dtypes)
    modules = {name for name, _ in model.named_modules()}
    leaves = [found[name] for name in get_module_leaves({name: found[name] for name in found if name in modules})]
    leaves = [size for size in leaves if size > 0]
    block = 0
    if no_split_module_classes:
        block, _ = get_max_layer_size(list(model.named_children()), found, no_split_module_classes)
    mean = sum(leaves) // max(len(leaves), 1)
    share = found[""] // (len(devices) - 1 if low_zero else len(devices)) + int(_BLOCK_MARGIN * max(block, mean))
    for device in devices[:-1]:
        limits[device] = min(limits[device], share)
    if low_zero:
        limits[devices[0]] = min(limits[devices[0]], max(0, found[""] - sum(limits[each] for each in devices[1:])))
    return limits


def clean_device_map(device_map: dict[str, Any], module_name: str = "") -> dict[str, Any]:
    """Replace the entries of a module's parts by one for the module if all have the same device; changes the map."""
    from accel_nb.bigmodel.planning.device_map import clean_device_map as clean

    return clean(device_map, module_name)


def get_module_size_with_ties(
    tied_params: Iterable[str],
    module_size: int,
    module_sizes: Mapping[str, int],
    modules_to_treat: Sequence[tuple[str, nn.Module]],
) -> tuple[int, list[str], list[nn.Module]]:
    """Return the size of a module with all that share tensors with it, counted once; their names and modules."""
    modules = dict(modules_to_treat)
    holders = {tied: next(name for name in modules if is_within(tied, name)) for tied in tied_params}
    for tied, holder in holders.items():
        module_size += module_sizes[holder] - module_sizes[tied]
    names = list(dict.fromkeys(holders.values()))
    return module_size, names, [modules[name] for name in names]
