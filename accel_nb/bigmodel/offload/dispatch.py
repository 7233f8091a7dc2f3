"""Models dispatched over devices, host memory and disk; offloaded weights are loaded for each forward."""

from __future__ import annotations

import copy
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
from accel_nb.bigmodel.offload.weight_prefetch import OffloadedWeight, OffloadError, WeightGroup, WeightPrefetcher
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

_RECORD_ATTRIBUTE = "_accel_nb_dispatched"
_USE_WEIGHTS_OF_CHILDREN = ("MultiheadAttention", "TransformerEncoderLayer", "TransformerDecoderLayer")
"""torch modules that use the weights of their children without calling them."""
_MAX_READERS = 4
_CORES_PER_READER = 4
_FILE_BYTES = 1 << 30
_ADAPTER_SHARE = 0.1
"""If at most this share of a model's bytes is trainable, and the rest frozen, the trainable parameters are adapters."""


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
    computation, block by block through ``buffer_bytes`` of buffers (None: twice the size of the largest block),
    prefetched in the order of the previous forward. They are frozen, and gradients are computed through them, so that
    adapters train. Trainable parameters of a mostly frozen model stay on the main device if they are few. Weights of a
    checkpoint on disk are given in ``offload_index`` (`LoadReport.on_disk`) and are read from there; others are written
    to files in ``offload_dir`` that have no names, and end with the model or the process. ``preload_module_classes``
    are loaded whole, since they use weights of their children without calling them (None: the blocks that the model
    repeats). Arguments named in ``skip_keys`` are not moved between devices.

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
    """Write all weights to a folder and compute on ``execution_device`` (None: the first accelerator, else the CPU).

    The files are unnamed: their space is freed with the model or at the end of the process.
    """
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
    record = model.__dict__.get(_RECORD_ATTRIBUTE)
    if record is not None:
        record.close()


def offloaded_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and values of a dispatched model's ``state_dict``, on the CPU, one at a time."""
    record = model.__dict__.get(_RECORD_ATTRIBUTE)
    offloaded = {} if record is None else {name: weight for weight in record.weights for name in weight.aliases}
    for name, tensor in model.state_dict(keep_vars=True).items():
        yield name, (read_weight(offloaded[name]) if name in offloaded else tensor.detach().cpu())


def has_offloaded_params(model: nn.Module) -> bool:
    """Return whether a model has weights that are loaded for each forward."""
    record = model.__dict__.get(_RECORD_ATTRIBUTE)
    return record is not None and bool(record.weights)


def get_dispatch_record(model: nn.Module) -> DispatchRecord:
    """Return the record of changes by `dispatch_model`; raises `MisuseError` for a model that was not dispatched."""
    record = model.__dict__.get(_RECORD_ATTRIBUTE)
    if record is None:
        raise MisuseError("the model was not dispatched; call dispatch_model or load_checkpoint_and_dispatch first")
    return record


def get_prefetcher(model: nn.Module) -> WeightPrefetcher | None:
    """Return the prefetcher of a dispatched model, with its counters; None if nothing is offloaded."""
    record = model.__dict__.get(_RECORD_ATTRIBUTE)
    return None if record is None else record.prefetcher


@dataclass(eq=False)
class ModuleWeights:
    """The offloaded weights of one module, without its submodules."""

    groups: list[WeightGroup] = field(default_factory=list)
    """The groups with these weights; several only for a module in several blocks."""
    weights: dict[str, OffloadedWeight] = field(default_factory=dict)
    """By name in the module."""


@dataclass(eq=False)
class DispatchRecord:
    """The changes of a model by `dispatch_model`, so that they can be undone."""

    model: nn.Module
    prefetcher: WeightPrefetcher | None = None
    weights: list[OffloadedWeight] = field(default_factory=list)
    modules: dict[nn.Module, ModuleWeights] = field(default_factory=dict)
    """The modules with direct offloaded weights, not only weights of submodules."""
    compute_devices: dict[str, torch.device] = field(default_factory=dict)
    """The modules named in the device map, and the device that computes each."""
    _wrapped: list[tuple[nn.Module, Any]] = field(default_factory=list)
    _pipeline_start: int | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> DispatchRecord:
        if self._wrapped:  # the copy's forwards would compute with this model's weights
            raise MisuseError("a dispatched model cannot be copied; call remove_hook_from_submodules(model) first")
        return DispatchRecord(copy.deepcopy(self.model, memo), compute_devices=dict(self.compute_devices))

    def wrap(self, module: nn.Module, make_forward: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace a module's forward by ``make_forward(forward)``."""
        inner = module.forward
        self._wrapped.append((module, module.__dict__.get("forward")))
        module.forward = functools.wraps(inner)(make_forward(inner))

    def begin_pipeline(self) -> None:
        """Undo an earlier pipeline; forwards that are replaced from now on belong to a new one."""
        if self._pipeline_start is not None:
            self._restore_forwards(self._pipeline_start)
        self._pipeline_start = len(self._wrapped)

    def close(self) -> None:
        """Restore weights and forwards."""
        values = {id(weight): read_weight(weight) for weight in self.weights}
        self._restore_forwards(0)
        if self.prefetcher is not None:
            self.prefetcher.close()
        made: dict[str, Tensor] = {}
        for weight in self.weights:
            value = values[id(weight)]
            if isinstance(weight.placeholder, nn.Parameter):
                value = clone_parameter_onto(weight.placeholder, value).requires_grad_(weight.was_trainable)
            value = made.setdefault(weight.name, value)
            for holder, key in weight.holders:
                holder[key] = value
        del self.model.__dict__[_RECORD_ATTRIBUTE]

    def _restore_forwards(self, start: int) -> None:
        """Undo the replacements of forwards from number ``start`` on."""
        for module, before in reversed(self._wrapped[start:]):
            if before is None:
                del module.__dict__["forward"]
            else:
                module.forward = before
        del self._wrapped[start:]


def read_weight(weight: OffloadedWeight) -> Tensor:
    """Return the value of an offloaded tensor, on the CPU."""
    if isinstance(weight.source, HostTensor) and weight.source.tensor.dtype == weight.placeholder.dtype:
        return weight.source.tensor
    out = torch.empty(weight.placeholder.shape, dtype=weight.placeholder.dtype, device="cpu")
    weight.source.read_into(out)
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
    if _RECORD_ATTRIBUTE in model.__dict__:
        raise MisuseError("the model is dispatched already; call remove_hook_from_submodules(model) first")
    check_device_map(model, device_map, must_exist=True)
    tensors = list_tensors(model)
    tree = ModuleTree(model, tensors, [*(find_blocks(model) if blocks is None else blocks), *_USE_WEIGHTS_OF_CHILDREN])
    device = (
        transfer.device if transfer else to_torch_device(main if main is not None else main_device(device_map.values()))
    )
    places = _Placement(
        model,
        device_map,
        device,
        offload_buffers,
        offloads_cpu=transfer is not None or not device_type(device).is_host,
    )
    offloaded = [tensor for tensor in tensors if places.is_offloaded(tensor)]
    sources = _sources(model, tensors, offloaded, places, offload_index or {}, offload_dir)
    record = DispatchRecord(model)
    groups = _group_weights(tree, model, offloaded, sources, record)
    budget = _budget(groups, buffer_bytes)
    _bypass_cache_if_too_small(sources.values())
    for tensor in tensors:  # first, since the device may lack memory: then the model still has all of its weights
        if tensor.name not in sources:
            _move(model, tensor, places.device_of(tensor))
    for weight in record.weights:
        for holder, key in weight.holders:
            holder[key] = weight.placeholder
    record.modules = _weights_of_modules(model, groups)
    if groups:
        readers = max(1, min(_MAX_READERS, num_usable_cores() // _CORES_PER_READER))
        record.prefetcher = WeightPrefetcher(groups, transfer or build_transfer(device), budget, num_readers=readers)
        for group in groups:
            record.wrap(tree.modules[group.name], functools.partial(_with_weights, record.prefetcher, group))
        called = {tree.modules[group.name] for group in groups}
        for module, held in record.modules.items():
            if module not in called and _is_callable(module):
                record.wrap(module, functools.partial(_with_weights_if_absent, record.prefetcher, held.groups))
    _wrap_devices(record, tree, places, [skip_keys] if isinstance(skip_keys, str) else list(skip_keys or ()))
    model.__dict__[_RECORD_ATTRIBUTE] = record
    return model


@dataclass(frozen=True)
class _Placement:
    """Decides which tensors are offloaded, and on which device the others stay."""

    model: nn.Module
    device_map: Mapping[str, Device]
    main: torch.device
    offload_buffers: bool
    offloads_cpu: bool

    def is_offloaded(self, tensor: ModelTensor) -> bool:
        """Return whether a tensor is offloaded, and loaded for each forward."""
        place = str(find_place(tensor.name, self.device_map))
        if not (place == "disk" or (self.offloads_cpu and place == "cpu")):
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
    """Write tensors to files without names, whose space is free when they are closed; raises `OffloadError`."""
    sources: dict[str, WeightSource] = {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for number, names in enumerate(_split_into_files(tensors)):
            path = folder / f"offloaded-{os.getpid()}-{id(tensors):x}-{number:05d}{SUFFIX}"
            try:
                save_file({name: tensors[name].cpu().contiguous() for name in names}, path)
                sources.update(SafetensorsFile(path).tensors)
            finally:
                path.unlink(missing_ok=True)
    except (OSError, SafetensorError) as error:
        raise OffloadError(f"the weights cannot be written to offload_dir {folder}: {error}") from error
    return sources


def _split_into_files(tensors: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """Yield the names of the tensors of each file."""
    names: list[str] = []
    nbytes = 0
    for name, tensor in tensors.items():
        names.append(name)
        nbytes += tensor.numel() * tensor.dtype.itemsize
        if nbytes >= _FILE_BYTES:
            yield names
            names, nbytes = [], 0
    if names:
        yield names


def _group_weights(
    tree: ModuleTree,
    model: nn.Module,
    offloaded: Sequence[ModelTensor],
    sources: Mapping[str, WeightSource],
    record: DispatchRecord,
) -> list[WeightGroup]:
    """Group offloaded tensors by the module whose forward needs them, in the model's order."""
    by_owner: dict[str, list[OffloadedWeight]] = {}
    for tensor in offloaded:
        value = _tensor(model, tensor.name)
        empty = value.detach().to("meta")
        if isinstance(value, nn.Parameter):
            empty = clone_parameter_onto(value, empty).requires_grad_(False)
        aliases: dict[str, list[str]] = {}
        for name in tensor.names:
            holder = tree.containing_part(name)
            owner = _called_module(tree, holder if holder in tree.modules else name.rpartition(".")[0])
            aliases.setdefault(owner, []).append(name)
        for owner, names in aliases.items():
            weight = OffloadedWeight(
                name=tensor.name,
                source=sources[tensor.name],
                placeholder=empty,
                holders=[_place(model, name) for name in names],
                aliases=tensor.names,
                was_trainable=value.requires_grad,
            )
            record.weights.append(weight)
            by_owner.setdefault(owner, []).append(weight)
    order = {name: position for position, name in enumerate(tree.modules)}
    return [
        WeightGroup(
            owner, weights, reads_few_rows=_is_lookup(tree.modules[owner]), contains_others=bool(tree.children(owner))
        )
        for owner, weights in sorted(by_owner.items(), key=lambda item: order[item[0]])
    ]


def _called_module(tree: ModuleTree, name: str) -> str:
    """Return the name of a module, or of its nearest ancestor with a forward: a `nn.ParameterList` is never called."""
    while name and not _is_callable(tree.modules[name]):
        name = name.rpartition(".")[0]
    return name


def _is_callable(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _weights_of_modules(model: nn.Module, groups: Sequence[WeightGroup]) -> dict[nn.Module, ModuleWeights]:
    """Return the offloaded weights of each module that has some."""
    owners = {id(held): module for module in model.modules() for held in (module._parameters, module._buffers)}
    found: dict[nn.Module, ModuleWeights] = {}
    for group in groups:
        for weight in group.weights:
            for holder, key in weight.holders:
                own = found.setdefault(owners[id(holder)], ModuleWeights())
                own.weights.setdefault(key, weight)
                if group not in own.groups:
                    own.groups.append(group)
    return found


def _is_lookup(module: nn.Module) -> bool:
    """Return whether a module only looks up rows of its weight."""
    return type(module) is nn.Embedding and module.max_norm is None


def _budget(groups: Sequence[WeightGroup], buffer_bytes: int | str | None) -> int:
    """Return the bytes of buffers: ``buffer_bytes``, else twice the largest group plus all that contain others."""
    largest = max(groups, key=lambda group: group.nbytes, default=None)
    if largest is None:
        return 0
    if buffer_bytes is None:
        outer = sum(group.nbytes for group in groups if group.contains_groups)
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
    holder, key = _place(model, name)
    return holder[key]


def _place(model: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """Return the dictionary of a module that holds a tensor, and its key there."""
    owner, _, key = name.rpartition(".")
    module = model.get_submodule(owner)
    holder: dict[str, Any] = module._parameters if key in module._parameters else module._buffers
    return holder, key


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
        holder, key = _place(model, name)
        holder[key] = moved


def _with_weights(prefetcher: WeightPrefetcher, group: WeightGroup, inner: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward that runs with the group's weights installed."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        prefetcher.acquire(group)
        try:
            if not torch.is_grad_enabled():
                return prefetcher.copy_views(group, inner(*args, **kwargs))
            with saved_tensors_hooks(*prefetcher.saved_tensors_hooks(group)):
                return prefetcher.copy_views(group, inner(*args, **kwargs))
        finally:
            prefetcher.release(group)

    return forward


def _with_weights_if_absent(
    prefetcher: WeightPrefetcher, groups: Sequence[WeightGroup], inner: Callable[..., Any]
) -> Callable[..., Any]:
    """Return the forward of a module in groups: it loads the first group if this thread has loaded none of them."""
    loading = _with_weights(prefetcher, groups[0], inner)

    def forward(*args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs) if prefetcher.has_acquired_any(groups) else loading(*args, **kwargs)

    return forward


def _wrap_devices(record: DispatchRecord, tree: ModuleTree, places: _Placement, skip_keys: Sequence[str]) -> None:
    """Wrap forwards to move inputs to the weights' devices, and the output to the device of the input."""
    devices = {name: places.compute_device(place) for name, place in places.device_map.items()}
    record.compute_devices = {name: device for name, device in devices.items() if name in tree.modules}
    if len({*devices.values(), places.main}) > 1:
        for name, device in record.compute_devices.items():
            if name:
                record.wrap(tree.modules[name], functools.partial(_with_moved_inputs, device, skip_keys, False))
    if record.prefetcher is not None:
        record.wrap(record.model, functools.partial(_with_recorded_order, record.prefetcher))
    if not device_type(places.main).is_host or len(set(devices.values())) > 1:
        record.wrap(record.model, functools.partial(_with_moved_inputs, places.main, skip_keys, True))


def _with_recorded_order(prefetcher: WeightPrefetcher, inner: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward of the whole model whose order the prefetcher records."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        prefetcher.begin_forward()
        completed = False
        try:
            output = inner(*args, **kwargs)
            completed = True
            return output
        finally:
            prefetcher.end_forward(completed=completed)

    return forward


def _with_moved_inputs(
    device: torch.device, skip_keys: Sequence[str], moves_output_back: bool, inner: Callable[..., Any]
) -> Any:
    """Return a forward that moves inputs to a device, and the output back to the device of the first input."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        left = {key: kwargs[key] for key in skip_keys if key in kwargs}
        first = next(iter(find_tensors((args, kwargs))), None) if moves_output_back else None
        args, kwargs = to_device((args, {key: value for key, value in kwargs.items() if key not in left}), device)
        output = inner(*args, **kwargs, **left)
        return output if first is None else to_device(output, first.device)

    return forward
