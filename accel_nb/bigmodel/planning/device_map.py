"""Planning and checking of device maps: the place of each part of a model, from sizes and memory limits."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from accel_nb.bigmodel.planning.cost_model import ForwardTime, Pace
from accel_nb.bigmodel.planning.module_tree import ModuleTree, is_within
from accel_nb.bigmodel.planning.placement import DeviceMap, describe_device_map, find_place
from accel_nb.bigmodel.planning.placement_search import NUM_BUFFERS, Arrangement, build_arrangement, is_better
from accel_nb.bigmodel.planning.sizes import (
    Device,
    device_problems,
    find_blocks,
    get_max_memory,
    list_ancestors,
    list_tensors,
)
from accel_nb.config.byte_sizes import read_bytes, size_text
from accel_nb.errors import ConfigError

PLANNING_METHODS = ("auto", "balanced", "balanced_low_0", "sequential")
_NUM_BISECTIONS = 40


@dataclass(frozen=True)
class ExtraMemory:
    """Memory needed in addition to weights while the model runs, in bytes.

    ``activations`` on every device that computes; ``kv_cache`` for each block, on the device that computes the block.
    """

    activations: int = 0
    kv_cache: int = 0

    @classmethod
    def parse(cls, activations: int | str, kv_cache: int | str) -> ExtraMemory:
        """Parse sizes like ``"2GB"``; raises `ConfigError`."""
        return cls(read_bytes(activations, "activations"), read_bytes(kv_cache, "kv_cache"))


@dataclass
class _Plan:
    places: DeviceMap = field(default_factory=dict)
    room: dict[Device, int] = field(default_factory=dict)
    device_of_tensor: dict[int, Device] = field(default_factory=dict)


def infer_auto_device_map(
    model: nn.Module,
    max_memory: Mapping[Device, int | str] | None = None,
    no_split_module_classes: Sequence[str] | str | None = None,
    dtype: torch.dtype | str | None = None,
    special_dtypes: Mapping[str, torch.dtype | str] | None = None,
    verbose: bool = False,
    clean_result: bool = True,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
    *,
    activations: int | str = 0,
    kv_cache: int | str = 0,
    pace: Pace | None = None,
    flops: Mapping[str, int] | None = None,
) -> DeviceMap:
    """Plan the place of each part of a model: accelerators in their order, then ``cpu``, then ``disk``.

    Parts that share a tensor are placed on one device, and a shared tensor counts once. ``no_split_module_classes`` are
    classes that are not split (None: the blocks that the model repeats). On the first device, memory is reserved for
    offloaded weights: two of the largest blocks. ``activations`` and ``kv_cache`` (for each block) are reserved too, in
    bytes. With ``fallback_allocation``, a device on which the next part does not fit receives a later part that does.
    With a ``pace``, the speed of the device and of transfers to it, parts that the first device computes are moved
    between device, cpu and disk as long as that shortens the expected time of a forward: parts with slow transfers stay
    on the device, and transfers overlap with the computation of other parts. ``flops`` are the operations of modules in
    a forward, by name, as `measure_forward_cost` measures them; without them a module takes the time of one pass over
    its weights, as for one token. ``verbose`` prints the plan.

    Raises `ConfigError` with all problems, including a part larger than the device that computes it.
    """
    limits = get_max_memory(max_memory)
    classes = _no_split_classes(model, no_split_module_classes)
    tree = ModuleTree(model, list_tensors(model, dtype, special_dtypes), classes)
    extra = ExtraMemory.parse(activations, kv_cache)
    plan = _plan_with_buffers(tree, limits, extra, offload_buffers=offload_buffers, fallback=fallback_allocation)
    notes: list[str] = []
    if pace is not None:
        plan.places, expected = _search_placement(tree, plan.places, limits, extra, pace, flops or {}, offload_buffers)
        notes.append(str(expected))
    places = _merge_entries(tree, plan.places) if clean_result else plan.places
    if verbose:
        print(
            describe_device_map(
                model, places, max_memory=max_memory, dtype=dtype, special_dtypes=special_dtypes, notes=notes
            )
        )
    return places


def estimate_forward(
    model: nn.Module,
    device_map: Mapping[str, Device],
    pace: Pace,
    dtype: torch.dtype | str | None = None,
    no_split_module_classes: Sequence[str] | str | None = None,
    *,
    flops: Mapping[str, int] | None = None,
    offload_buffers: bool = False,
) -> ForwardTime:
    """Return the expected time of a forward under a device map; arguments as in `infer_auto_device_map`."""
    tree = ModuleTree(model, list_tensors(model, dtype), _no_split_classes(model, no_split_module_classes))
    places = {part: _place_of_part(tree, part, device_map) for part in tree.leaf_parts("")}
    room: dict[Device, float] = dict.fromkeys([main_device(places.values()), "cpu", "disk"], float("inf"))
    arranged = build_arrangement(tree, places, room, pace, flops or {}, offload_buffers=offload_buffers)
    return arranged.time([places[part.names[0]] for part in arranged.parts])


def get_balanced_memory(
    model: nn.Module,
    max_memory: Mapping[Device, int | str] | None = None,
    no_split_module_classes: Sequence[str] | str | None = None,
    dtype: torch.dtype | str | None = None,
    special_dtypes: Mapping[str, torch.dtype | str] | None = None,
    low_zero: bool = False,
    *,
    activations: int | str = 0,
    kv_cache: int | str = 0,
) -> dict[Device, int]:
    """Return memory limits that divide the model among the accelerators as evenly as its parts allow.

    With ``low_zero`` the first one receives only parts that do not fit on the others. Limits do not change if the model
    does not fit on the accelerators, or there is only one.
    """
    limits = get_max_memory(max_memory)
    devices = [device for device in limits if device not in ("cpu", "disk") and limits[device] > 0]
    if len(devices) < 2:
        return limits
    classes = _no_split_classes(model, no_split_module_classes)
    tree = ModuleTree(model, list_tensors(model, dtype, special_dtypes), classes)
    extra = ExtraMemory.parse(activations, kv_cache)
    first, *others = devices

    def fits(limits: Mapping[Device, int]) -> bool:
        plan = _place_greedily(tree, {device: limits[device] - extra.activations for device in devices}, extra)
        return "disk" not in plan.places.values()

    def lower(lowered: Sequence[Device], base: Mapping[Device, int]) -> dict[Device, int]:
        """Lower the limits of some devices to the smallest common one with which the model fits; by bisection."""
        low, high = 0, max(base[device] for device in lowered)
        for _ in range(_NUM_BISECTIONS):
            middle = (low + high) // 2
            if fits({**base, **{device: min(base[device], middle) for device in lowered}}):
                high = middle
            else:
                low = middle + 1
        return {**base, **{device: min(base[device], high) for device in lowered}}

    if not fits(limits):
        return limits
    return lower(others, lower([first], limits)) if low_zero else lower(devices, limits)


def plan_device_map(
    model: nn.Module,
    method: str,
    max_memory: Mapping[Device, int | str] | None = None,
    no_split_module_classes: Sequence[str] | str | None = None,
    dtype: torch.dtype | str | None = None,
    *,
    activations: int | str = 0,
    kv_cache: int | str = 0,
    pace: Pace | None = None,
    flops: Mapping[str, int] | None = None,
    offload_buffers: bool = False,
) -> DeviceMap:
    """Return the device map for ``auto``, ``balanced``, ``balanced_low_0`` or ``sequential`` on this machine.

    Except for ``sequential`` it is the fastest one found for ``pace``, the speed of the device and of transfers to it
    (None: typical hardware).
    """
    if method not in PLANNING_METHODS:
        raise ConfigError(f"device_map {method!r} is unknown; there are {', '.join(PLANNING_METHODS)}, or a dictionary")
    limits = get_max_memory(max_memory)
    if method != "sequential":
        limits = get_balanced_memory(
            model,
            limits,
            no_split_module_classes,
            dtype,
            low_zero=method == "balanced_low_0",
            activations=activations,
            kv_cache=kv_cache,
        )
    return infer_auto_device_map(
        model,
        limits,
        no_split_module_classes,
        dtype,
        offload_buffers=offload_buffers,
        activations=activations,
        kv_cache=kv_cache,
        pace=None if method == "sequential" else pace or Pace.typical(main_device(_usable(limits))),
        flops=flops,
    )


def main_device(places: Iterable[Device]) -> Device:
    """Return the device that computes offloaded parts: the first accelerator of a map, else ``cpu``."""
    return next((device for device in places if str(device) not in ("cpu", "disk")), "cpu")


def _place_of_part(tree: ModuleTree, part: str, device_map: Mapping[str, Device]) -> Device:
    """Return the place of a part's first tensor, with cpu and disk as strings; cpu if the map has none for it."""
    own = (
        name
        for index in sorted(tree.tensor_indices(part))
        for name in tree.tensors[index].names
        if is_within(name, part)
    )
    place = find_place(next(own, part), device_map)
    if place is None or str(place) in ("cpu", "disk"):
        return "cpu" if place is None else str(place)
    return place


def _usable(limits: Mapping[Device, int]) -> list[Device]:
    return [device for device, limit in limits.items() if limit > 0]


def _no_split_classes(model: nn.Module, classes: Sequence[str] | str | None) -> list[str]:
    if classes is None:
        return find_blocks(model)
    return [classes] if isinstance(classes, str) else list(classes)


def _plan_with_buffers(
    tree: ModuleTree, limits: Mapping[Device, int], extra: ExtraMemory, *, offload_buffers: bool, fallback: bool
) -> _Plan:
    """Place all parts; if some are offloaded, reserve buffer memory on the main device and place again."""
    main = main_device(_usable(limits))
    room = {device: limit - extra.activations for device, limit in limits.items() if device not in ("cpu", "disk")}
    if "cpu" in limits:
        room["cpu"] = limits["cpu"] - (extra.activations if main == "cpu" else 0)
    if "disk" in limits:
        room["disk"] = limits["disk"]
    plan = _place_greedily(tree, room, extra, fallback=fallback)
    reserved = -1
    while (needed := _buffer_bytes(tree, plan, main, extra, offload_buffers)) > reserved:
        reserved = needed
        plan = _place_greedily(tree, {**room, main: room.get(main, 0) - reserved}, extra, fallback=fallback)
    _refuse_too_large(tree, plan, limits, main, extra)
    return plan


def _buffer_bytes(tree: ModuleTree, plan: _Plan, main: Device, extra: ExtraMemory, offload_buffers: bool) -> int:
    """Return the memory that the main device needs to compute offloaded parts."""
    offloaded = _offloaded(tree, plan, main)
    sizes = [tree.nbytes(tree.tensor_indices(part)) for part in offloaded]
    num_blocks = sum(tree.is_block(part) for part in offloaded)
    kept_buffers = {
        index
        for part in offloaded
        for index in tree.tensor_indices(part)
        if tree.tensors[index].is_buffer and not offload_buffers
    }
    return (
        min(NUM_BUFFERS, len(sizes)) * max(sizes, default=0) + extra.kv_cache * num_blocks + tree.nbytes(kept_buffers)
    )


def _offloaded(tree: ModuleTree, plan: _Plan, main: Device) -> list[str]:
    elsewhere = ("disk",) if main == "cpu" else ("cpu", "disk")
    return [leaf for part, device in plan.places.items() if device in elsewhere for leaf in tree.leaf_parts(part)]


def _refuse_too_large(
    tree: ModuleTree, plan: _Plan, limits: Mapping[Device, int], main: Device, extra: ExtraMemory
) -> None:
    problems: list[str] = []
    limit = limits.get(main, 0)
    for part in _offloaded(tree, plan, main):
        needed = tree.nbytes(tree.tensor_indices(part)) + extra.activations
        if needed > limit:
            module = tree.modules.get(part)
            kind = "a tensor" if module is None else type(module).__name__
            beside = f" with {size_text(extra.activations)} of activations" if extra.activations else ""
            problems.append(
                f"{part or 'the model'} ({kind}) needs {size_text(needed)}{beside}, and {main!r}, which computes "
                f"it, has a limit of {size_text(limit)}: {size_text(needed - limit)} too little; raise "
                f"max_memory[{main!r}], load in a smaller dtype, or take its class out of no_split_module_classes"
            )
    if sum(
        tree.tensors[index].nbytes for index, device in plan.device_of_tensor.items() if device == "disk"
    ) > limits.get("disk", float("inf")):
        problems.append(
            f"max_memory allows {size_text(limits['disk'])} on disk, which is less than the parts that remain"
        )
    if problems:
        raise ConfigError(problems)


def _place_greedily(
    tree: ModuleTree, room: Mapping[Device, int], extra: ExtraMemory, *, fallback: bool = False
) -> _Plan:
    """Fill the devices in order; parts that fit on none of them are placed on ``disk``."""
    devices = [device for device in room if device != "disk"]
    plan = _Plan(room=dict(room))
    queue = deque([""])
    for device in devices:
        passed: list[str] = []
        while queue:
            part = queue.popleft()
            if part in plan.places:
                continue
            if _has_placed_parts(part, plan) or not _place_if_fits(tree, part, device, plan, extra):
                if parts := tree.children(part):
                    queue.extendleft(reversed(parts))
                elif fallback and device not in plan.places.values():
                    passed.append(part)
                else:
                    queue.appendleft(part)
                    break
        queue.extendleft(reversed(passed))
    plan.room["disk"] = sum(tensor.nbytes for tensor in tree.tensors) + extra.kv_cache * len(tree.modules)
    while queue:
        part = queue.popleft()
        if part in plan.places:
            continue
        if not _has_placed_parts(part, plan):
            _place_if_fits(tree, part, "disk", plan, extra)
        else:
            queue.extendleft(reversed(tree.children(part)))
    return plan


def _search_placement(
    tree: ModuleTree,
    places: Mapping[str, Device],
    limits: Mapping[Device, int],
    extra: ExtraMemory,
    pace: Pace,
    flops: Mapping[str, int],
    offload_buffers: bool,
) -> tuple[DeviceMap, ForwardTime]:
    """Move parts that the main device computes between device, cpu and disk, so that a forward takes less time.

    Return all places, and the expected time of a forward.
    """
    place_of_leaf = {part: place for name, place in places.items() for part in tree.leaf_parts(name)}
    main = main_device(_usable(limits))
    kept = extra.activations + extra.kv_cache * sum(
        tree.is_block(part) for part, place in place_of_leaf.items() if place in (main, "cpu", "disk")
    )
    room: dict[Device, float] = {main: limits.get(main, 0) - kept}
    room.update({place: limits[place] for place in ("cpu",) if place in limits and place != main})
    room["disk"] = limits.get("disk", float("inf"))
    arranged = build_arrangement(tree, place_of_leaf, room, pace, flops, offload_buffers=offload_buffers)
    found = [place_of_leaf[part.names[0]] for part in arranged.parts]
    if len(set(found)) > 1:
        for start in arranged.initial_placements():
            found = start if is_better(arranged.time(start), arranged.time(found)) else found
        spaced = _space_blocks_evenly(tree, arranged, found)
        found = arranged.improve(found if is_better(arranged.time(found), arranged.time(spaced)) else spaced)
    for part, place in zip(arranged.parts, found, strict=True):
        place_of_leaf.update(dict.fromkeys(part.names, place))
    return place_of_leaf, arranged.time(found)


def _space_blocks_evenly(tree: ModuleTree, arranged: Arrangement, places: Sequence[Device]) -> list[Device]:
    """Exchange the places of blocks of equal size, so that offloaded ones are evenly spaced: a start for the search.

    The number of bytes at each place does not change.
    """
    spread = list(places)
    by_size: dict[int, list[int]] = {}
    for index, part in enumerate(arranged.parts):
        if len(part.names) == 1 and tree.is_block(part.names[0]):
            by_size.setdefault(part.nbytes, []).append(index)
    order = sorted(set(places), key=lambda place: {"cpu": 1, "disk": 2}.get(str(place), 0))
    for indices in by_size.values():
        counts = [sum(places[index] == place for index in indices) for place in order]
        for place, count in zip(order, counts, strict=True):
            total = len(indices)
            remaining = [block for i, block in enumerate(indices) if _is_in_even_sample(i, total, total - count)]
            for index in indices:
                if index not in remaining:
                    spread[index] = place
            indices = remaining
    return spread


def _is_in_even_sample(index: int, total: int, count: int) -> bool:
    """Return whether an item is among ``count`` evenly spaced ones of ``total``, of which the last item is one."""
    return (index + 1) * count // total > index * count // total


def _has_placed_parts(part: str, plan: _Plan) -> bool:
    return any(is_within(name, part) for name in plan.places)


def _place_if_fits(tree: ModuleTree, part: str, device: Device, plan: _Plan, extra: ExtraMemory) -> bool:
    """Place a part, and all parts that share tensors with it, if the device has enough memory."""
    parts = tree.parts_sharing_tensors(part)
    new = {index for name in parts for index in tree.tensor_indices(name)} - plan.device_of_tensor.keys()
    num_blocks = sum(tree.is_block(leaf) for name in parts for leaf in tree.leaf_parts(name))
    needed = tree.nbytes(new) + (extra.kv_cache * num_blocks if device != "disk" else 0)
    if needed > plan.room[device] or (plan.room[device] <= 0 and new):
        return False
    plan.room[device] -= needed
    plan.device_of_tensor.update(dict.fromkeys(new, device))
    plan.places.update(dict.fromkeys(sorted(parts, key=lambda name: (name != part, name)), device))
    return True


def _merge_entries(tree: ModuleTree, places: Mapping[str, Device]) -> DeviceMap:
    """Return the map with one entry for each module whose parts all have the same place."""

    def merge(name: str) -> DeviceMap:
        if name in places:
            return {name: places[name]}
        found: DeviceMap = {}
        for part in tree.children(name):
            found.update(merge(part))
        if found and len({str(device) for device in found.values()}) == 1:
            return {name: next(iter(found.values()))}
        return found

    return merge("")


def clean_device_map(device_map: DeviceMap, module_name: str = "") -> DeviceMap:
    """Replace the entries of a module's parts by one for the module if all have the same place; changes the map."""
    below = [name for name in device_map if is_within(name, module_name)]
    places = {str(device_map[name]) for name in below}
    if len(places) == 1 and len(below) > 1:
        place = device_map[below[0]]
        for name in below:
            del device_map[name]
        device_map[module_name] = place
    elif len(below) > 1:
        depth = len(module_name.split(".")) if module_name else 0
        for child in dict.fromkeys(".".join(name.split(".")[: depth + 1]) for name in below if name != module_name):
            clean_device_map(device_map, child)
    return device_map


def check_device_map(model: nn.Module, device_map: Mapping[str, Device], *, must_exist: bool = False) -> None:
    """Raise `ConfigError` with all problems of a device map.

    These are unknown devices (with ``must_exist`` also devices that this machine lacks), names that the model does not
    have, tensors without an entry, an entry for a module and another one for a part of it, and tied tensors on
    several devices.
    """
    if not isinstance(device_map, Mapping) or not device_map:
        raise ConfigError(
            f'device_map is {device_map!r}; write names and devices, as {{"": "cpu"}} for the whole model'
        )
    tensors = list_tensors(model)
    known = {name for tensor in tensors for own in tensor.names for name in list_ancestors(own)}
    known |= {name for name, _ in model.named_modules(remove_duplicate=False)}
    problems: list[str] = []
    for name, device in device_map.items():
        problems += device_problems(device, f"device_map[{name!r}]", must_exist=must_exist)
        if name not in known:
            near = _suggestion(str(name), known)
            problems.append(f"device_map names {name!r}, which the model does not have{near}")
        elif above := [other for other in list_ancestors(name)[:-1] if other in device_map]:
            problems.append(f"device_map places {name!r} and also {above[-1]!r}, which contains it; leave one out")
    places = {own: find_place(own, device_map) for tensor in tensors for own in tensor.names}
    if uncovered := [name for name, place in places.items() if place is None]:
        problems.append(f"device_map covers none of: {', '.join(uncovered)}; add them or a module that contains them")
    for tensor in tensors:
        own = {str(place) for name in tensor.names if (place := places[name]) is not None}
        if len(own) > 1:
            where = ", ".join(f"{name} on {places[name]!r}" for name in tensor.names)
            problems.append(f"one tied tensor is placed on several devices: {where}; give one device")
    if problems:
        raise ConfigError(problems)


def _suggestion(name: str, known: Iterable[str]) -> str:
    from difflib import get_close_matches

    near = get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
