"""Models dispatched over devices, host memory and disk; offloaded weights are loaded for each forward."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.batchnorm import _NormBase

from accel_nb.bigmodel.meta import clone_parameter_onto
from accel_nb.bigmodel.offload.weight_prefetch import OffloadedWeight, OffloadError, WeightPrefetcher, WeightUnit
from accel_nb.bigmodel.offload.weight_transfer import HostTensor, WeightSource, WeightTransfer, build_transfer
from accel_nb.bigmodel.planning.device_map import check_device_map, main_device
from accel_nb.bigmodel.planning.module_tree import ModuleTree
from accel_nb.bigmodel.planning.placement import find_place
from accel_nb.bigmodel.planning.sizes import (
    Device,
    ModelTensor,
    available_memory,
    find_blocks,
    list_tensors,
    to_torch_device,
)
from accel_nb.bigmodel.safetensors_reader import FileTensor, SafetensorsFile
from accel_nb.config.byte_sizes import read_bytes, size_text
from accel_nb.errors import ConfigError, MisuseError
from accel_nb.runtime.devices.registry import default_type, device_type
from accel_nb.runtime.process.hardware import num_usable_cores
from accel_nb.runtime.safetensors_header import SUFFIX
from accel_nb.runtime.tensors.nested import find_tensors, to_device

_HANDLE = "_accel_nb_dispatched"
_WHOLE = ("MultiheadAttention", "TransformerEncoderLayer", "TransformerDecoderLayer")
"""torch modules that use the weights of their children without calling them."""
_MOST_READERS = 4
_CORES_PER_READER = 4
_FILE_BYTES = 1 << 30
_ADAPTER_SHARE = 0.1
"""Trainable parameters among frozen ones count as adapters up to this share of all bytes."""


def dispatch_model(
    model: nn.Module,
    device_map: Mapping[str, Device],
    main_device: Device | None = None,
    offload_dir: str | os.PathLike[str] | None = None,
    offload_index: Mapping[str, FileTensor] | None = None,
    offload_buffers: bool = False,
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    *,
    buffer_bytes: int | str | None = None,
) -> nn.Module:
    """Place a model's weights by a device map and prepare its forwards; returns the model, changed in place.

    Weights on ``cpu`` or ``disk`` are copied to the main device (the map's first accelerator, else the CPU) for their
    computation, block by block through ``buffer_bytes`` of buffers (None: two of the largest parts), prefetched in the
    order of the previous forward. They are frozen; gradients pass through them, so that adapters train. Trainable
    parameters among frozen ones stay on the main device if they are few. Weights of a checkpoint on disk are given in
    ``offload_index`` (`LoadReport.on_disk`) and are read from there; others are written to ``offload_dir``.
    ``preload_module_classes`` are loaded whole, since they use weights of their children without calling them (None:
    the blocks that the model repeats). Arguments named in ``skip_keys`` are not moved between devices.

    Raises `ConfigError` with all problems of the map; a forward raises `OffloadError` if weights cannot be read.
    """
    return _dispatch(
        model,
        device_map,
        main_device,
        offload_dir=offload_dir,
        offload_index=offload_index,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        blocks=preload_module_classes,
        buffer_bytes=buffer_bytes,
    )


def cpu_offload(
    model: nn.Module,
    execution_device: Device | None = None,
    offload_buffers: bool = False,
    preload_module_classes: Sequence[str] | None = None,
    *,
    buffer_bytes: int | str | None = None,
) -> nn.Module:
    """Keep all weights in host memory; compute on ``execution_device`` (None: the first accelerator, else the CPU)."""
    device = _default_device() if execution_device is None else execution_device
    return dispatch_model(
        model,
        {"": "cpu"},
        device,
        offload_buffers=offload_buffers,
        preload_module_classes=preload_module_classes,
        buffer_bytes=buffer_bytes,
    )


def disk_offload(
    model: nn.Module,
    offload_dir: str | os.PathLike[str],
    execution_device: Device | None = None,
    offload_buffers: bool = False,
    preload_module_classes: Sequence[str] | None = None,
    *,
    buffer_bytes: int | str | None = None,
) -> nn.Module:
    """Write all weights to a folder and compute on ``execution_device`` (None: the first accelerator, else the CPU)."""
    device = _default_device() if execution_device is None else execution_device
    return dispatch_model(
        model,
        {"": "disk"},
        device,
        offload_dir=offload_dir,
        offload_buffers=offload_buffers,
        preload_module_classes=preload_module_classes,
        buffer_bytes=buffer_bytes,
    )


def remove_hook_from_submodules(model: nn.Module) -> None:
    """Undo `dispatch_model`: load offloaded weights into host memory and restore the forwards.

    Weights on devices stay there. Does nothing for a model that was not dispatched.
    """
    handle = model.__dict__.get(_HANDLE)
    if handle is not None:
        handle.close()


def offloaded_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and values of a dispatched model's ``state_dict``, on the CPU, one at a time."""
    handle = model.__dict__.get(_HANDLE)
    away = {} if handle is None else {name: piece for piece in handle.weights for name in piece.aliases}
    for name, tensor in model.state_dict(keep_vars=True).items():
        yield name, (read_weight(away[name]) if name in away else tensor.detach().cpu())


def has_offloaded_params(model: nn.Module) -> bool:
    """Return whether a model has weights that are loaded for each forward."""
    handle = model.__dict__.get(_HANDLE)
    return handle is not None and bool(handle.weights)


def get_dispatch_record(model: nn.Module) -> DispatchRecord:
    """Return the record of what `dispatch_model` changed; raises `MisuseError` for a model that was not dispatched."""
    handle = model.__dict__.get(_HANDLE)
    if handle is None:
        raise MisuseError("the model was not dispatched; call dispatch_model or load_checkpoint_and_dispatch first")
    return handle


def get_prefetcher(model: nn.Module) -> WeightPrefetcher | None:
    """Return the prefetcher of a dispatched model, with its counters; None if nothing is offloaded."""
    handle = model.__dict__.get(_HANDLE)
    return None if handle is None else handle.prefetcher


@dataclass(eq=False)
class ModuleWeights:
    """The offloaded weights of one module, without those of its parts."""

    units: list[WeightUnit] = field(default_factory=list)
    """The units with these weights; several only for a module in several blocks."""
    weights: dict[str, OffloadedWeight] = field(default_factory=dict)
    """By name in the module."""


@dataclass(eq=False)
class DispatchRecord:
    """The changes of a model by `dispatch_model`, so that they can be undone."""

    model: nn.Module
    prefetcher: WeightPrefetcher | None = None
    weights: list[OffloadedWeight] = field(default_factory=list)
    modules: dict[nn.Module, ModuleWeights] = field(default_factory=dict)
    """The modules that have offloaded weights of their own."""
    compute_devices: dict[str, torch.device] = field(default_factory=dict)
    """The modules named in the device map, and the device that computes each."""
    _wrapped: list[tuple[nn.Module, Any]] = field(default_factory=list)

    def wrap(self, module: nn.Module, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace a module's forward by ``make(forward)``."""
        inner = module.forward
        self._wrapped.append((module, module.__dict__.get("forward")))
        module.forward = functools.wraps(inner)(make(inner))

    def close(self) -> None:
        """Restore weights and forwards."""
        values = {id(piece): read_weight(piece) for piece in self.weights}
        for module, before in reversed(self._wrapped):
            if before is None:
                del module.__dict__["forward"]
            else:
                module.forward = before
        if self.prefetcher is not None:
            self.prefetcher.close()
        made: dict[str, Tensor] = {}
        for piece in self.weights:
            value = values[id(piece)]
            if isinstance(piece.placeholder, nn.Parameter):
                value = clone_parameter_onto(piece.placeholder, value).requires_grad_(piece.was_trainable)
            value = made.setdefault(piece.name, value)
            for holder, leaf in piece.holders:
                holder[leaf] = value
        del self.model.__dict__[_HANDLE]


def read_weight(piece: OffloadedWeight) -> Tensor:
    """Return the value of an offloaded tensor, on the CPU."""
    if isinstance(piece.source, HostTensor) and piece.source.tensor.dtype == piece.placeholder.dtype:
        return piece.source.tensor
    out = torch.empty(piece.placeholder.shape, dtype=piece.placeholder.dtype, device="cpu")
    piece.source.read_into(out)
    return out


def _dispatch(
    model: nn.Module,
    device_map: Mapping[str, Device],
    main: Device | None,
    *,
    offload_dir: str | os.PathLike[str] | None = None,
    offload_index: Mapping[str, FileTensor] | None = None,
    offload_buffers: bool = False,
    skip_keys: str | Sequence[str] | None = None,
    blocks: Sequence[str] | None = None,
    buffer_bytes: int | str | None = None,
    transfer: WeightTransfer | None = None,
) -> nn.Module:
    """Implement `dispatch_model`; a given ``transfer`` is used for weights in host memory on every device."""
    if _HANDLE in model.__dict__:
        raise MisuseError("the model is dispatched already; call remove_hook_from_submodules(model) first")
    check_device_map(model, device_map, must_exist=True)
    tensors = list_tensors(model)
    tree = ModuleTree(model, tensors, [*(find_blocks(model) if blocks is None else blocks), *_WHOLE])
    device = (
        transfer.device if transfer else to_torch_device(main if main is not None else main_device(device_map.values()))
    )
    places = _Placement(
        model,
        device_map,
        device,
        offload_buffers,
        sends_from_cpu=transfer is not None or not device_type(device).is_host,
    )
    offloaded = [tensor for tensor in tensors if places.is_offloaded(tensor)]
    sources = _sources(model, tensors, offloaded, places, offload_index or {}, offload_dir)
    handle = DispatchRecord(model)
    units = _units(tree, model, offloaded, sources, handle)
    budget = _budget(units, buffer_bytes)
    _bypass_cache_if_too_small(sources.values())
    for piece in handle.weights:
        for holder, leaf in piece.holders:
            holder[leaf] = piece.placeholder
    for tensor in tensors:
        if tensor.name not in sources:
            _move(model, tensor, places.device_of(tensor))
    handle.modules = _weights_of_modules(model, units)
    if units:
        readers = max(1, min(_MOST_READERS, num_usable_cores() // _CORES_PER_READER))
        handle.prefetcher = WeightPrefetcher(units, transfer or build_transfer(device), budget, num_readers=readers)
        for unit in units:
            handle.wrap(tree.modules[unit.name], functools.partial(_with_weights, handle.prefetcher, unit))
        called = {tree.modules[unit.name] for unit in units}
        for part, held in handle.modules.items():
            if part not in called and _is_callable(part):
                handle.wrap(part, functools.partial(_with_weights_if_alone, handle.prefetcher, held.units))
    _wrap_devices(handle, tree, places, [skip_keys] if isinstance(skip_keys, str) else list(skip_keys or ()))
    model.__dict__[_HANDLE] = handle
    return model


@dataclass(frozen=True)
class _Placement:
    """Decides which tensors are offloaded, and on which device the others stay."""

    model: nn.Module
    device_map: Mapping[str, Device]
    main: torch.device
    offload_buffers: bool
    sends_from_cpu: bool

    def is_offloaded(self, tensor: ModelTensor) -> bool:
        """Return whether a tensor is offloaded, and loaded for each forward."""
        place = str(find_place(tensor.name, self.device_map))
        if not (place == "disk" or (self.sends_from_cpu and place == "cpu")):
            return False
        if tensor.is_buffer:
            owner = self.model.get_submodule(tensor.name.rpartition(".")[0])
            # Kernels update running statistics without a change of the version counter.
            return self.offload_buffers and not isinstance(owner, _NormBase)
        return not (self._has_adapters and self.model.get_parameter(tensor.name).requires_grad)

    def device_of(self, tensor: ModelTensor) -> torch.device:
        """Return where a tensor stays."""
        return self.compute_device(find_place(tensor.name, self.device_map))

    def compute_device(self, place: Device | None) -> torch.device:
        """Return the device that computes with the weights of a place."""
        return self.main if place is None or str(place) in ("cpu", "disk") else to_torch_device(place)

    @functools.cached_property
    def _has_adapters(self) -> bool:
        sizes = {True: 0, False: 0}
        for parameter in self.model.parameters():
            sizes[parameter.requires_grad] += parameter.numel() * parameter.dtype.itemsize
        return sizes[False] > 0 and sizes[True] <= _ADAPTER_SHARE * sum(sizes.values())


def _default_device() -> Device:
    return "cpu" if default_type().is_host else 0


def _sources(
    model: nn.Module,
    tensors: Sequence[ModelTensor],
    offloaded: Sequence[ModelTensor],
    places: _Placement,
    index: Mapping[str, FileTensor],
    offload_dir: str | os.PathLike[str] | None,
) -> dict[str, WeightSource]:
    """Return the source of each offloaded tensor, by its first name; raises `ConfigError` with all problems."""
    sources: dict[str, WeightSource] = {}
    to_write: dict[str, Tensor] = {}
    for tensor in offloaded:
        value = _tensor(model, tensor.name)
        if tensor.name in index:
            sources[tensor.name] = index[tensor.name]
        elif value.is_meta:
            continue
        elif find_place(tensor.name, places.device_map) == "disk":
            to_write[tensor.name] = value.detach()
        else:
            sources[tensor.name] = HostTensor(value.detach().cpu())
    problems: list[str] = []
    known = sources.keys() | to_write.keys()
    without_value = [
        tensor.name for tensor in tensors if tensor.name not in known and _tensor(model, tensor.name).is_meta
    ]
    if without_value:
        more = f" and {len(without_value) - 50} more" if len(without_value) > 50 else ""
        names = ", ".join(without_value[:50]) + more
        problems.append(f"these tensors have no value: {names}; load a checkpoint with load_checkpoint_and_dispatch")
    if to_write and offload_dir is None:
        problems.append(
            f"device_map places these tensors on disk, and offload_dir is not given: {', '.join(list(to_write)[:50])}"
        )
    if problems:
        raise ConfigError(problems)
    if to_write:
        assert offload_dir is not None
        sources.update(_write_files(to_write, Path(offload_dir)))
    return sources


def _write_files(tensors: Mapping[str, Tensor], folder: Path) -> dict[str, WeightSource]:
    """Write tensors to files atomically; on failure all are removed and `OffloadError` is raised."""
    made: list[Path] = []
    sources: dict[str, WeightSource] = {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for number, group in enumerate(_groups(tensors)):
            path = folder / f"offloaded-{os.getpid()}-{id(tensors):x}-{number:05d}{SUFFIX}"
            part = path.with_suffix(".part")
            made += [path, part]
            save_file({name: tensors[name].cpu().contiguous() for name in group}, part)
            os.replace(part, path)
            sources.update(SafetensorsFile(path).tensors)
    except (OSError, SafetensorError) as error:
        for path in made:
            path.unlink(missing_ok=True)
        raise OffloadError(f"the weights cannot be written to offload_dir {folder}: {error}") from error
    return sources


def _groups(tensors: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """Yield the names for each file."""
    group: list[str] = []
    nbytes = 0
    for name, tensor in tensors.items():
        group.append(name)
        nbytes += tensor.numel() * tensor.dtype.itemsize
        if nbytes >= _FILE_BYTES:
            yield group
            group, nbytes = [], 0
    if group:
        yield group


def _units(
    tree: ModuleTree,
    model: nn.Module,
    offloaded: Sequence[ModelTensor],
    sources: Mapping[str, WeightSource],
    handle: DispatchRecord,
) -> list[WeightUnit]:
    """Group offloaded tensors by the module that needs them, in the model's order."""
    groups: dict[str, list[OffloadedWeight]] = {}
    for tensor in offloaded:
        value = _tensor(model, tensor.name)
        empty = value.detach().to("meta")
        if isinstance(value, nn.Parameter):
            empty = clone_parameter_onto(value, empty).requires_grad_(False)
        aliases: dict[str, list[str]] = {}
        for name in tensor.names:
            holder = tree.containing_part(name)
            owner = _called_part(tree, holder if holder in tree.modules else name.rpartition(".")[0])
            aliases.setdefault(owner, []).append(name)
        for owner, names in aliases.items():
            piece = OffloadedWeight(
                name=tensor.name,
                source=sources[tensor.name],
                placeholder=empty,
                holders=[_place(model, name) for name in names],
                aliases=tensor.names,
                was_trainable=value.requires_grad,
            )
            handle.weights.append(piece)
            groups.setdefault(owner, []).append(piece)
    order = {name: position for position, name in enumerate(tree.modules)}
    return [
        WeightUnit(owner, pieces, rows_only=_is_lookup(tree.modules[owner]), holds_others=bool(tree.children(owner)))
        for owner, pieces in sorted(groups.items(), key=lambda item: order[item[0]])
    ]


def _called_part(tree: ModuleTree, name: str) -> str:
    """Return a module, or if it only holds tensors for others, as `nn.ParameterList`, the one above that is called."""
    while name and not _is_callable(tree.modules[name]):
        name = name.rpartition(".")[0]
    return name


def _is_callable(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _weights_of_modules(model: nn.Module, units: Sequence[WeightUnit]) -> dict[nn.Module, ModuleWeights]:
    """Return the offloaded weights of each module that has some."""
    owners = {id(held): module for module in model.modules() for held in (module._parameters, module._buffers)}
    found: dict[nn.Module, ModuleWeights] = {}
    for unit in units:
        for piece in unit.weights:
            for holder, leaf in piece.holders:
                own = found.setdefault(owners[id(holder)], ModuleWeights())
                own.weights.setdefault(leaf, piece)
                if unit not in own.units:
                    own.units.append(unit)
    return found


def _is_lookup(module: nn.Module) -> bool:
    """Return whether a module only looks up rows of its weight."""
    return type(module) is nn.Embedding and module.max_norm is None


def _budget(units: Sequence[WeightUnit], buffer_bytes: int | str | None) -> int:
    """Return the bytes of buffers: as given, else two of the largest unit, plus the units that contain others."""
    largest = max(units, key=lambda unit: unit.nbytes, default=None)
    if largest is None:
        return 0
    if buffer_bytes is None:
        outer = sum(unit.nbytes for unit in units if unit.contains_units)
        return 2 * largest.nbytes + outer
    budget = read_bytes(buffer_bytes, "buffer_bytes")
    if largest.nbytes > budget:
        raise ConfigError(
            f"{largest.name or 'the model'} needs {size_text(largest.nbytes)} at once, and buffer_bytes allows "
            f"{size_text(budget)}: {size_text(largest.nbytes - budget)} too little"
        )
    return budget


def _bypass_cache_if_too_small(sources: Iterable[WeightSource]) -> None:
    """Bypass the page cache for files that do not fit in it: they would be evicted before the next forward."""
    in_files = [source for source in sources if isinstance(source, FileTensor)]
    if sum(source.nbytes for source in in_files) > available_memory():
        for file in {source.file for source in in_files}:
            file.bypass_cache()


def _tensor(model: nn.Module, name: str) -> Tensor:
    holder, leaf = _place(model, name)
    return holder[leaf]


def _place(model: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """Return the dictionary of a module that holds a tensor, and its key there."""
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    holder: dict[str, Any] = module._parameters if leaf in module._parameters else module._buffers
    return holder, leaf


def _move(model: nn.Module, tensor: ModelTensor, device: torch.device) -> None:
    """Move a tensor that is not offloaded; references to parameters stay valid."""
    value = _tensor(model, tensor.name)
    if value.device == device:
        return
    moved = value.detach().to(device)
    if isinstance(value, nn.Parameter):
        value.data = moved
        return
    for name in tensor.names:
        holder, leaf = _place(model, name)
        holder[leaf] = moved


def _with_weights(stream: WeightPrefetcher, unit: WeightUnit, inner: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward that runs with the unit's weights installed."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        stream.acquire(unit)
        try:
            if not torch.is_grad_enabled():
                return inner(*args, **kwargs)
            with saved_tensors_hooks(*stream.saved_tensors_hooks(unit)):
                return inner(*args, **kwargs)
        finally:
            stream.release(unit)

    return forward


def _with_weights_if_alone(
    stream: WeightPrefetcher, units: Sequence[WeightUnit], inner: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a forward of a part of blocks that loads a block if it is called outside of the forwards of all."""
    alone = _with_weights(stream, units[0], inner)

    def forward(*args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs) if stream.holds_any(units) else alone(*args, **kwargs)

    return forward


def _wrap_devices(handle: DispatchRecord, tree: ModuleTree, places: _Placement, skip_keys: Sequence[str]) -> None:
    """Wrap forwards to move inputs to the weights' devices, and the output to the device of the input."""
    devices = {name: places.compute_device(place) for name, place in places.device_map.items()}
    handle.compute_devices = {name: device for name, device in devices.items() if name in tree.modules}
    if len({*devices.values(), places.main}) > 1:
        for name, device in handle.compute_devices.items():
            if name:
                handle.wrap(tree.modules[name], functools.partial(_with_moved_inputs, device, skip_keys, False))
    if handle.prefetcher is not None:
        handle.wrap(handle.model, functools.partial(_with_recorded_order, handle.prefetcher))
    if not device_type(places.main).is_host or len(set(devices.values())) > 1:
        handle.wrap(handle.model, functools.partial(_with_moved_inputs, places.main, skip_keys, True))


def _with_recorded_order(stream: WeightPrefetcher, inner: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward of the whole model whose order the prefetcher records."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        stream.begin_forward()
        completed = False
        try:
            output = inner(*args, **kwargs)
            completed = True
            return output
        finally:
            stream.end_forward(completed=completed)

    return forward


def _with_moved_inputs(
    device: torch.device, skip_keys: Sequence[str], restores_device: bool, inner: Callable[..., Any]
) -> Any:
    """Return a forward that moves inputs to a device, and the output back to the device of the first input."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        left = {key: kwargs[key] for key in skip_keys if key in kwargs}
        first = next(iter(find_tensors((args, kwargs))), None) if restores_device else None
        args, kwargs = to_device((args, {key: value for key, value in kwargs.items() if key not in left}), device)
        output = inner(*args, **kwargs, **left)
        return output if first is None else to_device(output, first.device)

    return forward
