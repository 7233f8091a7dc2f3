"""Loading and placing of big models with accelerate's arguments, by `accel_nb.bigmodel`."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from accel_nb.accelerator.process.logging import get_logger
from accel_nb.bigmodel.loading import load as native_loading
from accel_nb.bigmodel.offload import dispatch as native_dispatch
from accel_nb.bigmodel.planning.device_map import check_device_map as check_map
from accel_nb.bigmodel.planning.device_map import plan_device_map
from accel_nb.bigmodel.planning.placement import find_place
from accel_nb.bigmodel.planning.sizes import Device, list_ancestors, list_tensors
from accel_nb.bigmodel.safetensors_reader import FileTensor, open_safetensors
from accel_nb.compat.constants import WEIGHTS_NAME
from accel_nb.compat.models.dispatch_hooks import attach_dispatch_hooks
from accel_nb.compat.models.module_tensors import retie_parameters, set_module_tensor_to_device
from accel_nb.compat.models.offloaded_files import OffloadedWeightsLoader, offload_weight, save_offload_index
from accel_nb.errors import ConfigError, MisuseError
from accel_nb.runtime.safetensors_header import SUFFIX

_PICKLED = (".bin", ".pt", ".pth")


def check_device_map(model: nn.Module, device_map: Mapping[str, Device]) -> None:
    """Raise ValueError for tensors that a map does not cover, and warn about names that are not in the model."""
    tensors = [name for entry in list_tensors(model) for name in entry.names]
    known = {part for name in tensors for part in list_ancestors(name)} | {name for name, _ in model.named_modules()}
    if unknown := [name for name in device_map if name not in known]:
        warnings.warn(
            f"names in device_map that match no module or tensor of the model are ignored: {', '.join(unknown)}",
            stacklevel=2,
        )
    if uncovered := [name for name in tensors if find_place(name, device_map) is None]:
        raise ValueError(f"device_map has no device for {', '.join(uncovered)}; add them, or modules that have them")


def dispatch_model(
    model: nn.Module,
    device_map: Mapping[str, Device],
    main_device: Device | None = None,
    state_dict: Mapping[str, Tensor] | None = None,
    offload_dir: str | os.PathLike[str] | None = None,
    offload_index: Mapping[str, Any] | None = None,
    offload_buffers: bool = False,
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    force_hooks: bool = False,
) -> nn.Module:
    """Place a model by a device map, with prefetching of offloaded weights; see `accel_nb.dispatch_model`.

    Weights on the meta device are read from ``state_dict``, from the safetensors files of ``offload_index``, or from
    the raw files in ``offload_dir``, which are then mapped into memory. ``force_hooks`` has no effect: a model on
    one device needs no hooks.
    """
    check_device_map(model, device_map)
    device_map = dict(device_map)
    files, mapped = _sources_of(offload_dir, offload_index)
    for entry in list_tensors(model):
        source_name = next((name for name in entry.names if state_dict is not None and name in state_dict), None)
        values = state_dict if source_name is not None else mapped
        source_name = source_name or next((name for name in entry.names if name in mapped), None)
        if source_name is None or values is None or not _get_tensor(model, entry.name).is_meta:
            continue
        for name in entry.names:
            set_module_tensor_to_device(model, name, "cpu", value=values[source_name])
        if values is mapped:
            device_map = _override_device(device_map, entry.names, "cpu")
    if len(set(map(str, device_map.values()))) == 1 and not native_dispatch.has_offloaded_params(model):
        only = next(iter(device_map.values()))
        if str(only) not in ("cpu", "disk"):
            model.to(only)
            vars(model)["hf_device_map"] = device_map
            return model
    native_dispatch.dispatch_model(
        model,
        device_map,
        main_device,
        offload_dir,
        files,
        offload_buffers,
        skip_keys,
        preload_module_classes,
    )
    attach_dispatch_hooks(model)
    vars(model)["hf_device_map"] = device_map
    return model


def _sources_of(
    folder: str | os.PathLike[str] | None, index: Mapping[str, Any] | None
) -> tuple[dict[str, FileTensor], Mapping[str, Tensor]]:
    """Return the tensors of an index that are in safetensors files, and those in raw files."""
    if index is None and folder is not None and (Path(folder) / "index.json").is_file():
        index = json.loads((Path(folder) / "index.json").read_text())
    files: dict[str, FileTensor] = {}
    raw: dict[str, Any] = {}
    opened: dict[str, Any] = {}
    for name, entry in (index or {}).items():
        if isinstance(entry, FileTensor):
            files[name] = entry
        elif "safetensors_file" in entry:
            path = os.fspath(entry["safetensors_file"])
            opened[path] = opened.get(path) or open_safetensors(path)
            files[name] = opened[path].tensors[entry.get("weight_name", name)]
        else:
            raw[name] = entry
    return files, OffloadedWeightsLoader(save_folder=folder, index=raw) if raw else {}


def _override_device(device_map: dict[str, Device], names: Sequence[str], place: Device) -> dict[str, Device]:
    """Return the device map with ``place`` for its entries in ``names``; if it has none, for all that are "disk"."""
    if any(name in device_map for name in names):
        return {**device_map, **{name: place for name in names if name in device_map}}
    return {name: place if str(old) == "disk" else old for name, old in device_map.items()}


def _get_tensor(model: nn.Module, name: str) -> Tensor:
    path, _, leaf = name.rpartition(".")
    return getattr(model.get_submodule(path), leaf)


def cpu_offload(
    model: nn.Module,
    execution_device: Device | None = None,
    offload_buffers: bool = False,
    state_dict: Mapping[str, Tensor] | None = None,
    preload_module_classes: Sequence[str] | None = None,
) -> nn.Module:
    """Keep all weights in host memory and compute on a device; see `accel_nb.cpu_offload`.

    If the device is the CPU, the modules get hooks, which libraries check for, and their weights are on meta.
    """
    if execution_device is None or torch.device(execution_device).type == "cpu":
        from accel_nb.compat.models.align_hooks import AlignDevicesHook, attach_align_device_hook
        from accel_nb.compat.models.model_hooks import add_hook_to_module

        device = "cpu" if execution_device is None else execution_device
        values = dict(model.state_dict()) if state_dict is None else state_dict
        if torch.accelerator.current_accelerator() is None or execution_device is not None:
            add_hook_to_module(model, AlignDevicesHook(io_same_device=True), append=True)
            attach_align_device_hook(
                model,
                execution_device=device,
                offload=True,
                weights_map=values,
                offload_buffers=offload_buffers,
                preload_module_classes=preload_module_classes,
            )
            return model
    native_dispatch.cpu_offload(model, execution_device, offload_buffers, preload_module_classes)
    attach_dispatch_hooks(model)
    return model


def disk_offload(
    model: nn.Module,
    offload_dir: str | os.PathLike[str],
    execution_device: Device | None = None,
    offload_buffers: bool = False,
    preload_module_classes: Sequence[str] | None = None,
) -> nn.Module:
    """Write all weights to a folder and compute on a device; see `accel_nb.disk_offload`."""
    native_dispatch.disk_offload(model, offload_dir, execution_device, offload_buffers, preload_module_classes)
    attach_dispatch_hooks(model)
    return model


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: Mapping[str, Device] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool = False,
    offload_buffers: bool = False,
    keep_in_fp32_modules: Sequence[str] | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> None:
    """Load safetensors files, or files of torch.save (tensors only), into a model, each tensor to its device.

    Tensors on disk stay in their files of safetensors, and those of torch.save are written to ``offload_folder``, as
    raw files with an index. ``offload_state_dict`` and ``full_state_dict`` have no effect: each
    tensor is read directly to its place.
    """
    _load(
        model, checkpoint, device_map, dtype, offload_buffers, keep_in_fp32_modules, strict, broadcast_from_rank0,
        offload_8bit_bnb, offload_folder,
    )  # fmt: skip


def _load(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: Mapping[str, Device] | None,
    dtype: str | torch.dtype | None,
    offload_buffers: bool,
    keep_in_fp32_modules: Sequence[str] | None,
    strict: bool,
    broadcast_from_rank0: bool,
    is_8bit: bool = False,
    offload_folder: str | os.PathLike[str] | None = None,
) -> dict[str, FileTensor]:
    """Load a checkpoint and return the tensors that stay in safetensors files."""
    if is_8bit:
        raise MisuseError("offload_8bit_bnb is for bitsandbytes only: call load_and_quantize_model instead")
    pickled = list(_pickled_files(Path(checkpoint)))
    if not pickled:
        report = native_loading.load_checkpoint_in_model(
            model, checkpoint, device_map, dtype, offload_buffers, keep_in_fp32_modules, strict,
            broadcast_from_rank0=broadcast_from_rank0,
        )  # fmt: skip
        return dict(report.on_disk)
    if device_map is not None:
        check_map(model, device_map)
        if "disk" in device_map.values() and offload_folder is None:
            raise ConfigError(
                f"{os.fspath(checkpoint)} was written by torch.save, so tensors on disk are copied into files: give "
                "offload_folder, or a checkpoint of safetensors, whose files are read in place"
            )
    _load_pickled(
        model, checkpoint, pickled, device_map, dtype, keep_in_fp32_modules or (), strict, offload_folder or ""
    )
    return {}


def _pickled_files(path: Path) -> Iterator[Path]:
    """Yield the files of torch.save in a checkpoint, which is a file, an index or a folder."""
    if path.is_dir():
        if any(path.glob(f"*{SUFFIX}")):
            return
        indices = sorted(path.glob("*.index.json"))
        if (path / WEIGHTS_NAME).is_file():  # beside it may be files of an optimizer, and arguments
            yield path / WEIGHTS_NAME
            return
        if len(indices) == 1:
            yield from _pickled_files(indices[0])
            return
        yield from sorted(file for file in path.iterdir() if file.suffix in _PICKLED)
    elif path.suffix == ".json":
        index = json.loads(path.read_text())
        names = sorted(set(index.get("weight_map", index).values()))
        for name in names:
            if Path(name).name != name:
                raise ConfigError(f"{path} names the file {name!r}, which is not in the same folder")
            if Path(name).suffix in _PICKLED:
                yield path.parent / name
    elif path.suffix in _PICKLED:
        yield path


def _load_pickled(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    files: Sequence[Path],
    device_map: Mapping[str, Device] | None,
    dtype: str | torch.dtype | None,
    keep_in_fp32_modules: Sequence[str],
    strict: bool,
    offload_folder: str | os.PathLike[str],
) -> None:
    groups = [entry.names for entry in list_tensors(model)]
    tied_names = {name: names for names in groups for name in names}
    target_dtype = getattr(torch, dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
    loaded: set[str] = set()
    unexpected: list[str] = []
    index: dict[str, Any] = {}
    for file in files:
        for name, value in torch.load(file, map_location="cpu", weights_only=True, mmap=True).items():
            if name not in tied_names:
                unexpected.append(name)
                continue
            loaded.add(name)
            new_dtype = target_dtype
            if any(part in name.split(".") for part in keep_in_fp32_modules):
                new_dtype = torch.float32
            new_dtype = new_dtype if value.is_floating_point() else None
            place = "cpu" if device_map is None else find_place(name, device_map)
            place = _get_tensor(model, name).device if device_map is None else place
            if str(place) == "disk":
                os.makedirs(offload_folder, exist_ok=True)
                offload_weight(value if new_dtype is None else value.to(new_dtype), name, offload_folder, index)
                for tied in tied_names[name]:
                    set_module_tensor_to_device(model, tied, "meta")
                continue
            device = "cpu" if place is None or str(place) == "meta" else place
            set_module_tensor_to_device(model, name, device, value.clone(), new_dtype)
    save_offload_index(index, offload_folder)
    # A file may hold a tied weight under one of its names only.
    shared = [sorted(names, key=lambda name: name not in loaded) for names in groups if loaded.intersection(names)]
    retie_parameters(model, [names for names in shared if len(names) > 1])
    missing = [name for name in model.state_dict() if not loaded.intersection(tied_names.get(name, (name,)))]
    if strict and (unexpected or missing):
        raise ConfigError(
            f"{os.fspath(checkpoint)}: unexpected keys: {', '.join(unexpected) or 'none'}; missing keys: "
            f"{', '.join(missing) or 'none'}; strict=False loads the others"
        )
    if unexpected:
        get_logger(__name__).warning(
            f"{type(model).__name__} has no tensors of these names, so those of {os.fspath(checkpoint)} were left out: "
            f"{', '.join(unexpected)}"
        )


def load_checkpoint_and_dispatch(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: str | Mapping[str, Device] | None = None,
    max_memory: Mapping[Device, int | str] | None = None,
    no_split_module_classes: Sequence[str] | str | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    offload_buffers: bool = False,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool | None = None,
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    force_hooks: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> nn.Module:
    """Load a checkpoint and place the model by a device map; see `accel_nb.load_checkpoint_and_dispatch`."""
    if isinstance(device_map, str):
        device_map = plan_device_map(
            model, device_map, max_memory, no_split_module_classes, dtype, offload_buffers=offload_buffers
        )
    on_disk = _load(
        model, checkpoint, device_map, dtype, offload_buffers, None, strict, broadcast_from_rank0, False, offload_folder
    )
    if device_map is None:
        return model
    blocks = [no_split_module_classes] if isinstance(no_split_module_classes, str) else no_split_module_classes
    return dispatch_model(
        model,
        device_map,
        offload_index=on_disk or None,
        offload_dir=offload_folder,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes or blocks,
        force_hooks=force_hooks,
    )
