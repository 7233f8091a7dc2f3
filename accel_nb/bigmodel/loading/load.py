"""Loading of checkpoints into models: each tensor is read from its file to its device, or stays on disk."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from accel_nb.bigmodel.host_memory import empty_tensors
from accel_nb.bigmodel.loading.tensor_filling import fill_all
from accel_nb.bigmodel.meta import clone_parameter_onto
from accel_nb.bigmodel.offload.dispatch import dispatch_model
from accel_nb.bigmodel.planning.cost_model import Pace
from accel_nb.bigmodel.planning.device_map import check_device_map, plan_device_map
from accel_nb.bigmodel.planning.placement import find_place
from accel_nb.bigmodel.planning.sizes import Device, matches_name, parse_dtype, to_torch_device
from accel_nb.bigmodel.quantization.quantize import QuantizedLinear, quantized_layers
from accel_nb.bigmodel.safetensors_reader import FileTensor, SafetensorsCheckpoint, open_safetensors
from accel_nb.errors import ConfigError
from accel_nb.runtime.devices.registry import device_type
from accel_nb.runtime.distributed.communicator import Communicator, LocalComm
from accel_nb.runtime.distributed.current_world import current_comm

_MAX_NAMES = 50
"""Maximum number of names in one line of an error or warning."""
_MESSAGE_BYTES = 64 << 20


@dataclass(frozen=True)
class LoadReport:
    """The result of loading: names missing and unexpected in the checkpoint, and tensors that stay in its files."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    on_disk: dict[str, FileTensor] = field(default_factory=dict)
    """A tensor with several names has an entry for each. Pass this to `dispatch_model` as ``offload_index``."""


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: Mapping[str, Device] | None = None,
    dtype: torch.dtype | str | None = None,
    offload_buffers: bool = False,
    keep_in_fp32_modules: Sequence[str] | None = None,
    strict: bool = False,
    *,
    broadcast_from_rank0: bool = False,
    mmap: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> LoadReport:
    """Read safetensors (a file, an index, a folder) into a model, each tensor directly to its place in ``device_map``.

    Tensors on ``disk`` stay in the files, and on the meta device in the model. Floating-point tensors are converted to
    ``dtype`` (None: the dtype of the model's tensor), except in modules in ``keep_in_fp32_modules`` (to float32).
    Memory is allocated for the tensors and, for conversion and copies to a device, some MiB per thread. With ``mmap``,
    tensors on the CPU that need no conversion are memory maps of the files instead of copies. The files must not change
    while the model is used: access to a truncated one ends the process. Mapped tensors are not aligned, so kernels may
    round differently.

    All names, shapes and dtypes are checked first. Nothing is loaded if a tensor is missing in the checkpoint and the
    model has no value for it, or if a shape differs. With ``strict``, any missing or unexpected tensor is an error;
    without it, a warning. ``on_progress(done, total)`` receives bytes. Each process reads the files,
    unless ``broadcast_from_rank0``: then only rank 0 reads and broadcasts the tensors; every rank must call, and no
    tensor may stay on disk or be mapped. Raises `ConfigError` with all problems.
    """
    comm = current_comm() if broadcast_from_rank0 else LocalComm()
    if device_map is not None:
        check_device_map(model, device_map, must_exist=True)
    wanted = None if dtype is None else parse_dtype(dtype)
    if mmap and broadcast_from_rank0:
        raise ConfigError(
            "mmap needs the files on every rank, and broadcast_from_rank0 reads them on one; leave one out"
        )
    matched, loaded = _match_on_ranks(model, checkpoint, wanted, keep_in_fp32_modules or (), strict, comm)
    _check_disk_places(matched, device_map, comm)
    targets: dict[int, Tensor] = {}
    new: list[int] = []
    on_host: list[int] = []
    to_quantize: list[tuple[int, torch.device]] = []
    for index, (slot, source) in enumerate(matched):
        place = find_place(slot.names[0], device_map) if device_map is not None else None
        if place == "disk" and source is not None and (offload_buffers or not slot.is_buffer):
            slot.replace(model, torch.empty(slot.shape, dtype=slot.dtype, device="meta"))
            loaded.on_disk.update(dict.fromkeys(slot.names, source))
            continue
        place = "cpu" if place == "disk" else place
        device = slot.target_device(None if place is None else to_torch_device(place))
        if slot.layer is not None:
            to_quantize.append((index, device))
        elif slot.can_fill_in_place(device):
            targets[index] = slot.tensor.detach()
        elif device_type(device).is_host and mmap and source is not None and source.dtype == slot.dtype:
            slot.replace(model, source.map())
        elif device_type(device).is_host:
            on_host.append(index)
        else:
            targets[index] = torch.empty(slot.shape, dtype=slot.dtype, device=device)
            new.append(index)
    memory = empty_tensors([(matched[index][0].shape, matched[index][0].dtype) for index in on_host])
    targets.update(zip(on_host, memory, strict=True))
    sources = [matched[index][1] for index in (*targets, *(index for index, _ in to_quantize))]
    filler = _TensorFiller(comm, sum(source.nbytes for source in sources if source is not None), on_progress)
    filler.fill([(matched[index][1], targets[index]) for index in sorted(targets)])
    for index in (*new, *on_host):
        matched[index][0].replace(model, targets[index])
    largest = max((matched[index][0].nbytes for index, _ in to_quantize), default=0)
    buffers: dict[torch.device, Tensor] = {}
    for index, device in to_quantize:  # one at a time, so that there is only one unquantized weight at any moment
        slot, source = matched[index]
        if device not in buffers:
            on_cpu = empty_tensors([((largest,), torch.uint8)])[0] if device_type(device).is_host else None
            buffers[device] = torch.empty(largest, dtype=torch.uint8, device=device) if on_cpu is None else on_cpu
        weight = buffers[device][: slot.nbytes].view(slot.dtype).view(slot.shape)
        filler.fill([(source, weight)])
        assert slot.layer is not None
        slot.layer.quantize_weight(weight)
    return loaded


def load_checkpoint_and_dispatch(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: str | Mapping[str, Device] | None = None,
    max_memory: Mapping[Device, int | str] | None = None,
    no_split_module_classes: Sequence[str] | str | None = None,
    offload_buffers: bool = False,
    dtype: torch.dtype | str | None = None,
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    strict: bool = False,
    *,
    activations: int | str = 0,
    kv_cache: int | str = 0,
    pace: Pace | None = None,
    buffer_bytes: int | str | None = None,
    keep_in_fp32_modules: Sequence[str] | None = None,
    broadcast_from_rank0: bool = False,
    mmap: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> nn.Module:
    """Load safetensors into a model and dispatch it over devices, host memory and disk; returns the model.

    ``device_map`` is a mapping, or ``auto``, ``balanced``, ``balanced_low_0`` or ``sequential`` (see
    `infer_auto_device_map`); None loads only. Weights on disk stay in the checkpoint's files, without a copy. For the
    other arguments see `infer_auto_device_map`, `load_checkpoint_in_model` and `dispatch_model`.
    """
    if isinstance(device_map, str):
        device_map = plan_device_map(
            model,
            device_map,
            max_memory,
            no_split_module_classes,
            dtype,
            activations=activations,
            kv_cache=kv_cache,
            pace=pace,
            offload_buffers=offload_buffers,
        )
    loaded = load_checkpoint_in_model(
        model,
        checkpoint,
        device_map,
        dtype,
        offload_buffers,
        keep_in_fp32_modules,
        strict,
        broadcast_from_rank0=broadcast_from_rank0,
        mmap=mmap,
        on_progress=on_progress,
    )
    if device_map is None:
        return model
    return dispatch_model(
        model,
        device_map,
        offload_index=loaded.on_disk,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes or _as_list(no_split_module_classes),
        buffer_bytes=buffer_bytes,
    )


_Matched = list[tuple["ModelTensorSlot", FileTensor | None]]
"""The model's tensors, and the source of each on this rank; None if rank 0 reads it."""


@dataclass
class _TensorFiller:
    """Fills tensors from files or by broadcast from rank 0, and reports the progress in bytes."""

    comm: Communicator
    total: int
    on_progress: Callable[[int, int], None] | None
    _done: int = 0

    def fill(self, jobs: Sequence[tuple[FileTensor | None, Tensor]]) -> None:
        """Fill tensors; every rank must pass the same ones in the same order."""
        before = self._done

        def report(done: int, _: int) -> None:
            self._done = before + done
            if self.on_progress is not None:
                self.on_progress(self._done, self.total)

        fill_all([(source, tensor) for source, tensor in jobs if source is not None], report)
        if self.comm.world.size > 1:
            for _, tensor in jobs:
                flat = tensor.reshape(-1).view(torch.uint8)
                for begin in range(0, len(flat), _MESSAGE_BYTES):
                    self.comm.broadcast(flat[begin : begin + _MESSAGE_BYTES])


def _match_on_ranks(
    model: nn.Module,
    path: str | os.PathLike[str],
    dtype: torch.dtype | None,
    keep_in_fp32: Sequence[str],
    strict: bool,
    comm: Communicator,
) -> tuple[_Matched, LoadReport]:
    """Match model and checkpoint on rank 0, and broadcast the result; all ranks raise `ConfigError` if one does."""
    if comm.world.size == 1:
        matched, loaded = match_tensors(model, open_safetensors(path), dtype, keep_in_fp32, strict)
        return list(matched), loaded
    found: _Matched = []
    loaded = LoadReport()
    problems: list[str] = []
    if comm.world.rank == 0:
        try:
            matched, loaded = match_tensors(model, open_safetensors(path), dtype, keep_in_fp32, strict)
            found = list(matched)
        except ConfigError as error:
            problems = error.problems
    own = [[slot.names, list(slot.shape), str(slot.dtype)] for slot, _ in found]
    quantized = [slot.names[0] for slot, _ in found if slot.layer is not None]
    sent = comm.broadcast_json([problems, own, quantized, loaded.missing, loaded.unexpected])
    if sent[0]:
        raise ConfigError(sent[0])
    by_name: dict[str, ModelTensorSlot] = {}
    if comm.world.rank:
        by_name = {slot.names[0]: slot for slot in _slots(model, set(sent[2]), dtype, keep_in_fp32)}
        found = [(by_name[names[0]], None) for names, _, _ in sent[1] if names[0] in by_name]
        own = [[slot.names, list(slot.shape), str(slot.dtype)] for slot, _ in found]
        loaded = LoadReport(sent[3], sent[4])
    same = own == sent[1] and (not comm.world.rank or len(by_name) == len(own) + len(loaded.missing))
    differ = [rank for rank, fits in enumerate(comm.all_gather_json(same)) if not fits]
    if differ:
        raise ConfigError(
            f"the models of ranks {differ} have other tensors than that of rank 0: build the same model on every rank"
        )
    return found, loaded


def _check_disk_places(matched: _Matched, device_map: Mapping[str, Device] | None, comm: Communicator) -> None:
    """Raise `ConfigError` if tensors would stay in files that some rank lacks, or that store them unquantized."""
    away = [
        slot for slot, _ in matched if device_map is not None and find_place(slot.names[0], device_map) == "disk"
    ]  # fmt: skip
    if any(comm.all_gather_json(bool(away))) and comm.world.size > 1:
        raise ConfigError("with broadcast_from_rank0 nothing can stay on disk: place all tensors on devices or cpu")
    if left := [slot.names[0] for slot in away if slot.layer is not None]:
        raise ConfigError(
            f"tensors that are not quantized in the checkpoint cannot stay on disk: {_join_names(left)}; write a "
            "quantized checkpoint with accel_nb.quantize_checkpoint first, and load that"
        )


def _as_list(names: Sequence[str] | str | None) -> Sequence[str] | None:
    return [names] if isinstance(names, str) else names


@dataclass
class ModelTensorSlot:
    """One tensor of the model: all its names, and its dtype after loading."""

    names: list[str]
    tensor: Tensor
    dtype: torch.dtype
    is_buffer: bool
    layer: QuantizedLinear | None = None
    """The layer that quantizes it, if the checkpoint stores the weight unquantized."""

    @property
    def shape(self) -> torch.Size:
        """Its shape in model and checkpoint."""
        return self.tensor.shape

    @property
    def nbytes(self) -> int:
        """Its size after loading."""
        return self.tensor.numel() * self.dtype.itemsize

    def target_device(self, wanted: torch.device | None) -> torch.device:
        """Return the device after loading: ``wanted``, else the device of the model's tensor."""
        return wanted or (torch.device("cpu") if self.tensor.is_meta else self.tensor.device)

    def can_fill_in_place(self, device: torch.device) -> bool:
        """Return whether the model's tensor has the right device and dtype, so that it can be filled in place."""
        own = self.tensor
        return own.device == device and own.dtype == self.dtype and own.is_contiguous()

    def replace(self, model: nn.Module, value: Tensor) -> None:
        """Replace the tensor under all its names; a parameter is replaced by one of the same class and attributes."""
        made = clone_parameter_onto(self.tensor, value) if isinstance(self.tensor, nn.Parameter) else value
        for name in self.names:
            owner, _, attribute = name.rpartition(".")
            module = model.get_submodule(owner)
            (module._buffers if self.is_buffer else module._parameters)[attribute] = made  # type: ignore[assignment]


def match_tensors(
    model: nn.Module,
    checkpoint: SafetensorsCheckpoint,
    dtype: torch.dtype | None = None,
    keep_in_fp32: Sequence[str] = (),
    strict: bool = False,
) -> tuple[list[tuple[ModelTensorSlot, FileTensor]], LoadReport]:
    """Pair the model's tensors with the checkpoint's; raises `ConfigError` with all mismatches."""
    return _match(_slots(model, checkpoint.tensors, dtype, keep_in_fp32), checkpoint, strict)


def _slots(
    model: nn.Module, stored: Collection[str], dtype: torch.dtype | None, keep_in_fp32: Sequence[str]
) -> list[ModelTensorSlot]:
    """Return the tensors of a checkpoint of the model: parameters and persistent buffers."""
    kept = model.state_dict(keep_vars=True)
    buffers = dict(model.named_buffers(remove_duplicate=False))
    layers = quantized_layers(model)
    parts = {f"{name}.{part}" for name, layer in layers.items() for part in layer.part_names}
    slots: dict[int, ModelTensorSlot] = {}
    for name, layer in layers.items():
        if (weight := f"{name}.weight") in stored:
            whole = torch.empty(layer.out_features, layer.in_features, dtype=layer.dtype, device="meta")
            slots[id(whole)] = ModelTensorSlot([weight], whole, layer.dtype, False, layer)
            for part in layer.part_names:
                del kept[f"{name}.{part}"]
    for name, tensor in kept.items():
        if not isinstance(tensor, Tensor):
            continue  # extra state of a module, which no safetensors file holds
        if name in parts:
            slots[id(tensor)] = ModelTensorSlot([name], tensor, tensor.dtype, False)
            continue
        if id(tensor) in slots:
            slots[id(tensor)].names.append(name)
            continue
        own = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        if tensor.is_floating_point() and any(matches_name(name, keep) for keep in keep_in_fp32):
            own = torch.float32
        slots[id(tensor)] = ModelTensorSlot([name], tensor, own, name in buffers)
    return list(slots.values())


def _match(
    slots: Sequence[ModelTensorSlot], checkpoint: SafetensorsCheckpoint, strict: bool
) -> tuple[list[tuple[ModelTensorSlot, FileTensor]], LoadReport]:
    """Pair the model's tensors with the checkpoint's; raises `ConfigError` with all mismatches."""
    tensors = checkpoint.tensors
    matched: list[tuple[ModelTensorSlot, FileTensor]] = []
    problems: list[str] = []
    missing: list[str] = []
    without_value: list[str] = []
    for slot in slots:
        sources = [tensors[name] for name in slot.names if name in tensors]
        if not sources:
            (without_value if slot.tensor.is_meta else missing).append(slot.names[0])
            continue
        problems += [problem for source in sources if (problem := _mismatch(slot, source))]
        matched.append((slot, sources[0]))
    known = {name for slot in slots for name in slot.names}
    unexpected = [name for name in tensors if name not in known]
    what = f"the checkpoint {checkpoint.path}"
    if without_value or (strict and missing):
        problems.append(f"{what} lacks: {_join_names([*without_value, *(missing if strict else [])])}")
    if strict and unexpected:
        problems.append(f"{what} has tensors that the model lacks: {_join_names(unexpected)}")
    if not problems:
        problems = [
            f"{' and '.join([source.name, *names])} are one tensor in the model and differ in {what}"
            for slot, source in matched
            if (names := [name for name in slot.names if name in tensors and not _equal(source, tensors[name])])
        ]
    if problems:
        raise ConfigError(problems)
    if missing:
        warnings.warn(
            f"{what} lacks tensors of the model, which keep their values: {_join_names(missing)}", stacklevel=3
        )
    if unexpected:
        warnings.warn(
            f"{what} has tensors that the model lacks, which are not loaded: {_join_names(unexpected)}", stacklevel=3
        )
    return matched, LoadReport(missing, unexpected)


def _mismatch(slot: ModelTensorSlot, source: FileTensor) -> str | None:
    if tuple(slot.shape) != source.shape:
        return f"{source.name} has the shape {source.shape} in the checkpoint and {tuple(slot.shape)} in the model"
    if source.dtype != slot.dtype and not (source.dtype.is_floating_point and slot.dtype.is_floating_point):
        return f"{source.name} is {source.dtype} in the checkpoint and {slot.dtype} in the model"
    return None


def _equal(first: FileTensor, second: FileTensor) -> bool:
    """Return whether two tensors hold the same bytes; reads them in chunks, unless they are the same object."""
    if first is second:
        return True
    parts = zip(first.chunks(), second.chunks(), strict=True)
    same = ((a.view(torch.uint8), b.view(torch.uint8)) for (_, a), (_, b) in parts)
    return first.dtype == second.dtype and all(torch.equal(a, b) for a, b in same)


def _join_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more
