"""Weights in files of raw bytes, one for each tensor, with an index: accelerate's format of offloaded weights."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from accel_nb.bigmodel.safetensors_reader import SafetensorsCheckpoint, open_safetensors

_INDEX = "index.json"


def _path_of(folder: str | os.PathLike[str], name: str) -> Path:
    if not name or name in (".", "..") or any(sign in name for sign in ("/", "\\", "\0")):
        raise ValueError(f"{name!r} is not a name of a tensor: a file of that name would be in another folder")
    return Path(folder) / f"{name}.dat"


def offload_weight(
    weight: Tensor, weight_name: str, offload_folder: str | os.PathLike[str], index: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Write one tensor's bytes to ``NAME.dat``, and return the index with its shape and dtype added."""
    index = {} if index is None else index
    index[weight_name] = {"dtype": str(weight.dtype).removeprefix("torch."), "shape": list(weight.shape)}
    raw = weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    raw.numpy().tofile(_path_of(offload_folder, weight_name))
    return index


def load_offloaded_weight(weight_file: str | os.PathLike[str], weight_info: Mapping[str, Any]) -> Tensor:
    """Return a tensor of a file of raw bytes: a copy-on-write mapping of the file."""
    shape, dtype = [int(size) for size in weight_info["shape"]], getattr(torch, str(weight_info["dtype"]))
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{weight_info['dtype']!r} is not a dtype of torch")
    numel = 1
    for size in shape:
        numel *= size
    if numel == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.from_file(os.fspath(weight_file), shared=False, size=numel, dtype=dtype).reshape(shape)


def save_offload_index(index: Mapping[str, Any] | None, offload_folder: str | os.PathLike[str]) -> None:
    """Add entries to the folder's index; without entries leave it unchanged."""
    if not index:
        return
    path = Path(offload_folder) / _INDEX
    known = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**known, **index}, indent=2))


def offload_state_dict(save_dir: str | os.PathLike[str], state_dict: Mapping[str, Tensor]) -> None:
    """Write all tensors of a state dict to a folder, with an index."""
    os.makedirs(save_dir, exist_ok=True)
    index: dict[str, Any] = {}
    for name, value in state_dict.items():
        offload_weight(value, name, save_dir, index)
    save_offload_index(index, save_dir)


def load_offloaded_weights(
    model: nn.Module, index: Mapping[str, Mapping[str, Any]] | None, offload_folder: str | os.PathLike[str]
) -> None:
    """Write the tensors of an index into a model."""
    from accel_nb.compat.models.module_tensors import set_module_tensor_to_device

    for name, entry in (index or {}).items():
        value = load_offloaded_weight(_path_of(offload_folder, name), entry)
        set_module_tensor_to_device(model, name, "cpu", value=value)


def extract_submodules_state_dict(state_dict: Mapping[str, Any], submodule_names: Iterable[str]) -> dict[str, Any]:
    """Return the entries of some modules, or tensors, by their full names."""
    names = list(submodule_names)
    return {key: value for key, value in state_dict.items() if any(f"{key}.".startswith(f"{name}.") for name in names)}


class OffloadedWeightsLoader(Mapping[str, Tensor]):
    """Tensors in memory, in a folder of raw files, or in files of safetensors, by their names.

    Args:
        state_dict: Tensors in memory.
        save_folder: A folder that `offload_state_dict` has written.
        index: The folder's index; entries with ``safetensors_file`` name a file of safetensors in its place, with the
            tensor's own name there as ``weight_name``.
        device: Where tensors are returned; by default where they are.
    """

    def __init__(
        self,
        state_dict: Mapping[str, Tensor] | None = None,
        save_folder: str | os.PathLike[str] | None = None,
        index: Mapping[str, Any] | None = None,
        device: torch.device | str | int | None = None,
    ) -> None:
        if state_dict is None and save_folder is None and index is None:
            raise ValueError("pass state_dict, save_folder or index: there is nothing to load")
        self.state_dict = {} if state_dict is None else state_dict
        self.save_folder, self.device = save_folder, device
        if index is None and save_folder is not None:
            index = json.loads((Path(save_folder) / _INDEX).read_text())
        self.index: Mapping[str, Any] = index or {}
        self.all_keys = list(dict.fromkeys([*self.state_dict, *self.index]))
        self._files: dict[str, SafetensorsCheckpoint] = {}

    def __getitem__(self, key: str) -> Tensor:
        if key in self.state_dict:
            return self._placed(self.state_dict[key])
        entry = self.index[key]
        if "safetensors_file" in entry:
            name = os.fspath(entry["safetensors_file"])
            if name not in self._files:
                self._files[name] = open_safetensors(name)
            value = self._files[name].tensors[entry.get("weight_name", key)].map()
            kind = entry.get("dtype")
            return self._placed(value if kind is None else value.to(getattr(torch, kind)))
        if self.save_folder is None:
            raise ValueError(f"{key} is in a file, and there is no save_folder to look for it in")
        return self._placed(load_offloaded_weight(_path_of(self.save_folder, key), entry))

    def _placed(self, value: Tensor) -> Tensor:
        return value if self.device is None else value.to(self.device)

    def __iter__(self) -> Iterator[str]:
        return iter(self.all_keys)

    def __len__(self) -> int:
        return len(self.all_keys)


class PrefixedDataset(Mapping[str, Any]):
    """The entries of a mapping whose keys begin with a prefix, by the rest of the key.

    Iteration yields the whole keys, as in accelerate.
    """

    def __init__(self, dataset: Mapping[str, Any], prefix: str) -> None:
        self.dataset, self.prefix = dataset, prefix

    def __getitem__(self, key: str) -> Any:
        return self.dataset[f"{self.prefix}{key}"]

    def __iter__(self) -> Iterator[str]:
        return iter([key for key in self.dataset if key.startswith(self.prefix)])

    def __len__(self) -> int:
        return len([key for key in self.dataset if key.startswith(self.prefix)])


def load_state_dict(
    checkpoint_file: str | os.PathLike[str], device_map: Mapping[str, int | str | torch.device] | None = None
) -> dict[str, Tensor]:
    """Return the tensors of one file, on the devices of a map; those of ``disk`` on the CPU."""
    from accel_nb.bigmodel.planning.placement import find_place
    from accel_nb.bigmodel.planning.sizes import to_torch_device

    found = _tensors_of(checkpoint_file)
    if device_map is None:
        return found
    placed: dict[str, Tensor] = {}
    for name, value in found.items():
        place = find_place(name, device_map)
        placed[name] = value if place in (None, "disk", "cpu") else value.to(to_torch_device(place))
    return placed


def _tensors_of(checkpoint_file: str | os.PathLike[str]) -> dict[str, Tensor]:
    if os.fspath(checkpoint_file).endswith(".safetensors"):
        from safetensors.torch import load_file

        return load_file(checkpoint_file)
    return torch.load(checkpoint_file, map_location="cpu", weights_only=True)


def get_state_dict_from_offload(
    module: nn.Module, module_name: str, state_dict: MutableMapping[str, Any], device_to_put_offload: Any = "cpu"
) -> MutableMapping[str, Any]:
    """Replace the entries of an offloaded module's weights in a state dict by their values."""
    from accel_nb.compat.models.module_tensors import align_module_device

    prefix = module_name.rpartition(".")[0]
    with align_module_device(module, device_to_put_offload):
        for name, value in module.state_dict().items():
            key = f"{prefix}.{name}" if prefix else name
            if key in state_dict:
                state_dict[key] = value.to(device_to_put_offload)
    return state_dict


def get_state_dict_offloaded_model(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of a model, with the values of tensors that hooks load for each forward."""
    from accel_nb.compat.models.module_tensors import align_module_device

    found = {name: value for name, value in model.state_dict().items() if not value.is_meta}
    for prefix, module in model.named_modules():
        with align_module_device(module, "cpu"):
            for name in _own_names(module):
                value = module._parameters.get(name, module._buffers.get(name))
                if value is not None and not value.is_meta:
                    found.setdefault(f"{prefix}.{name}" if prefix else name, value.detach().clone())
    order = model.state_dict().keys()
    return {name: found[name] for name in order if name in found}


def _own_names(module: nn.Module) -> Collection[str]:
    return [*module._parameters, *(name for name in module._buffers if name not in module._non_persistent_buffers_set)]
