"""Files of quantized weights: safetensors shards, and ``quantization.json``, which describes them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from accel_nb.bigmodel.host_memory import trim_heap
from accel_nb.bigmodel.loading.load import match_tensors
from accel_nb.bigmodel.offload.dispatch import offloaded_weights
from accel_nb.bigmodel.planning.sizes import list_tensors, parse_dtype
from accel_nb.bigmodel.quantization.kernels import Quantization
from accel_nb.bigmodel.quantization.quantize import (
    QuantizationReport,
    quantize_model,
    quantized_layers,
    replace_linear_layers,
    report_quantization,
)
from accel_nb.bigmodel.safetensors_reader import open_safetensors
from accel_nb.errors import ConfigError
from accel_nb.runtime.safetensors_header import SUFFIX
from accel_nb.runtime.strict_json import parse_strict_json

DESCRIPTION_FILE = "quantization.json"
_VERSION = 1
_MAX_RECORD_BYTES = 10_000_000
_FILE_BYTES = 1 << 30


def save_quantized(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Write a quantized model, dispatched or not, to an empty folder, from which `accel_nb.load` reads it.

    Tied tensors are written once; takes memory for one file of 1 GiB. Raises `ConfigError`.
    """
    _write(offloaded_weights(model), model, Path(folder))


def quantize_checkpoint(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    quantization: str | Quantization = "int8",
    *,
    dtype: torch.dtype | str | None = None,
    keep_in_fp32_modules: Sequence[str] | None = None,
) -> QuantizationReport:
    """Write a copy of a checkpoint with quantized linear layers, one layer at a time; the model need not fit in memory.

    ``model`` was built under `init_empty_weights`; it stays empty, and its linear layers are replaced by quantized ones
    (if it has such already, ``quantization`` is ignored). Floating-point tensors are converted to ``dtype`` (None: the
    model's dtypes), except in ``keep_in_fp32_modules``. Raises `ConfigError` with all problems.
    """
    opened = open_safetensors(checkpoint)
    wanted = None if dtype is None else parse_dtype(dtype)
    if not quantized_layers(model):
        quantize_model(model, quantization, dtype=wanted, keep_in_fp32_modules=keep_in_fp32_modules or ())
    matched, _ = match_tensors(model, opened, wanted, keep_in_fp32_modules or ())

    def values() -> Iterator[tuple[str, Tensor]]:
        for slot, source in matched:
            value = torch.empty(slot.shape, dtype=slot.dtype, device="cpu")
            source.read_into(value)
            if slot.layer is None:
                yield slot.names[0], value
                continue
            name = slot.names[0].rpartition(".")[0]
            parts = slot.layer.kernel.quantize(value)
            slot.layer.measure_error(value, parts)
            trim_heap()
            yield from ((f"{name}.{part}", tensor) for part, tensor in parts.items())

    _write(values(), model, Path(folder))
    return report_quantization(model)


def replace_quantized_layers(model: nn.Module, checkpoint: str | os.PathLike[str]) -> bool:
    """Replace the layers that a checkpoint stores quantized; return whether there are any.

    Raises `ConfigError` if ``quantization.json`` is wrong.
    """
    path = Path(checkpoint)
    record = (path if path.is_dir() else path.parent) / DESCRIPTION_FILE
    if not record.is_file():
        return False
    try:
        if record.stat().st_size > _MAX_RECORD_BYTES:
            raise ValueError(f"it has more than {_MAX_RECORD_BYTES} bytes")
        found = parse_strict_json(record.read_bytes())
        if not isinstance(found, dict) or found.pop("version", None) != _VERSION:
            raise ValueError(f"it is not a record of version {_VERSION}")
        layers = {str(name): parse_dtype(dtype) for name, dtype in found.pop("layers").items()}
        skipped = found.pop("skip_modules")
        how = Quantization(**found, skip_modules=None if skipped is None else tuple(map(str, skipped)))
    except (ValueError, TypeError, KeyError, AttributeError, ConfigError) as error:
        raise ConfigError(f"{record} does not describe how the weights in its folder are quantized: {error}") from error
    present = dict(model.named_modules())
    if wrong := [name for name in layers if type(present.get(name)) is not nn.Linear]:
        raise ConfigError(f"{record} names modules that are not linear layers of the model: {', '.join(wrong[:50])}")
    for name, dtype in layers.items():
        replace_linear_layers(model, how, [name], dtype)
    return True


def _write(named: Iterable[tuple[str, Tensor]], model: nn.Module, folder: Path) -> None:
    """Write tensors to files of about 1 GiB, then an index and the record ``quantization.json``."""
    layers = quantized_layers(model)
    if not layers:
        raise ConfigError("the model has no quantized layers; call quantize_model first")
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty; quantized weights get a folder of their own")
    first_names = {name: held.name for held in list_tensors(model) for name in held.names}
    weight_map: dict[str, str] = {}
    group: dict[str, Tensor] = {}

    def write() -> None:
        file = f"model-{len(set(weight_map.values())) + 1:05d}{SUFFIX}"
        save_file(group, folder / file, {"format": "pt"})
        weight_map.update(dict.fromkeys(group, file))
        group.clear()

    for name, tensor in named:
        if first_names.get(name, name) != name:
            continue
        group[name] = tensor.detach().cpu().contiguous()
        if sum(value.nbytes for value in group.values()) >= _FILE_BYTES:
            write()
    if group:
        write()
    record = {
        "version": _VERSION,
        **asdict(next(iter(layers.values())).quantization),
        "layers": {name: str(layer.dtype).removeprefix("torch.") for name, layer in layers.items()},
    }
    (folder / DESCRIPTION_FILE).write_text(json.dumps(record, indent=1))
    # Last: without an index the folder is not a checkpoint.
    (folder / f"model{SUFFIX}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
