"""Quantization by bitsandbytes with accelerate's names: `BnbQuantizationConfig` and `load_and_quantize_model`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from accel_nb.bigmodel.loading.load import load_checkpoint_and_dispatch
from accel_nb.bigmodel.loading.quantized_files import quantize_checkpoint, replace_quantized_layers
from accel_nb.bigmodel.offload.dispatch import dispatch_model
from accel_nb.bigmodel.planning.device_map import check_device_map, plan_device_map
from accel_nb.bigmodel.planning.sizes import Device, matches_name
from accel_nb.bigmodel.quantization.kernels import Quantization
from accel_nb.bigmodel.quantization.quantize import quantize_model
from accel_nb.errors import ConfigError

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class BnbQuantizationConfig:
    """Options of bitsandbytes by accelerate's names; one of ``load_in_8bit`` and ``load_in_4bit`` must be set.

    ``bnb_4bit_compute_dtype`` is the dtype in which 4-bit layers compute, ``torch_dtype`` the dtype of other weights
    (None: float16 with 8 bits, else the compute dtype). ``skip_modules`` are not quantized (None: tied layers and the
    head), nor are ``keep_in_fp32_modules``, which are kept in float32. Both are names of modules, or components of
    dotted names.
    """

    load_in_8bit: bool = False
    llm_int8_threshold: float = 6.0
    load_in_4bit: bool = False
    bnb_4bit_quant_type: str = "fp4"
    bnb_4bit_use_double_quant: bool = False
    bnb_4bit_compute_dtype: torch.dtype | str = "fp16"
    torch_dtype: torch.dtype | str | None = None
    skip_modules: Sequence[str] | None = None
    keep_in_fp32_modules: Sequence[str] | None = None

    def __post_init__(self) -> None:
        problems: list[str] = []
        if self.load_in_4bit == self.load_in_8bit:
            which = "both are set" if self.load_in_4bit else "neither is set"
            problems.append(f"of load_in_8bit and load_in_4bit {which}; set one")
        if self.bnb_4bit_quant_type not in ("fp4", "nf4"):
            problems.append(f"bnb_4bit_quant_type is {self.bnb_4bit_quant_type!r}; allowed are 'fp4' and 'nf4'")
        for name in ("bnb_4bit_compute_dtype", "torch_dtype"):
            given = getattr(self, name)
            if given is not None and given not in _DTYPES and given not in _DTYPES.values():
                problems.append(f"{name} is {given!r}; allowed are {', '.join(_DTYPES)} and the torch dtypes of these")
        if problems:
            raise ConfigError(problems)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights that are not quantized, and of the computation of all layers."""
        default = torch.float16 if self.load_in_8bit else self.bnb_4bit_compute_dtype
        given = self.torch_dtype or default
        return _DTYPES[given] if isinstance(given, str) else given

    def as_quantization(self) -> Quantization:
        """Return the options as a `Quantization`, which has no ``keep_in_fp32_modules``: see `quantize`."""
        return Quantization(
            method="bnb_int8" if self.load_in_8bit else "nf4" if self.bnb_4bit_quant_type == "nf4" else "fp4",
            threshold=self.llm_int8_threshold,
            nested=self.bnb_4bit_use_double_quant,
            skip_modules=None if self.skip_modules is None else tuple(self.skip_modules),
        )

    def quantize(self, model: nn.Module, dtype: torch.dtype | str | None = None) -> None:
        """Replace linear layers of a model in place; they compute in ``dtype`` (None: the layers' own)."""
        kept = self.keep_in_fp32_modules or ()
        quantize_model(model, self.as_quantization(), dtype=dtype, keep_in_fp32_modules=kept)


def load_and_quantize_model(
    model: nn.Module,
    bnb_quantization_config: BnbQuantizationConfig,
    weights_location: str | os.PathLike[str] | None = None,
    device_map: str | Mapping[str, Device] | None = None,
    no_split_module_classes: Sequence[str] | str | None = None,
    max_memory: Mapping[Device, int | str] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
) -> nn.Module:
    """Quantize linear layers by bitsandbytes, in place or while they are loaded; return the same model.

    Without ``weights_location`` the model's own values are quantized in place. With it, safetensors are loaded, whose
    linear layers are quantized one at a time; a model on the meta device needs it. Weights that ``device_map`` places
    on disk are written quantized to ``offload_folder``. Raises `ConfigError` with all problems.
    """
    config = bnb_quantization_config
    is_empty = any(parameter.is_meta for parameter in model.parameters())
    if is_empty and weights_location is None:
        raise ConfigError("the model is empty, and weights_location is not given: name the checkpoint to load")
    if weights_location is None:
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.is_floating_point():
                is_kept = any(matches_name(name, keep) for keep in config.keep_in_fp32_modules or ())
                tensor.data = tensor.data.to(torch.float32 if is_kept else config.dtype)
        config.quantize(model)
        places = _places(model, device_map, no_split_module_classes, max_memory, config)
        return model if places is None else dispatch_model(model, places, offload_dir=offload_folder)
    if not replace_quantized_layers(model, weights_location):
        config.quantize(model, config.dtype)
        places = _places(model, device_map, no_split_module_classes, max_memory, config)
        if places is not None and "disk" in places.values():
            if offload_folder is None:
                raise ConfigError("device_map places quantized weights on disk, and offload_folder is not given")
            quantize_checkpoint(
                model,
                weights_location,
                offload_folder,
                dtype=config.dtype,
                keep_in_fp32_modules=config.keep_in_fp32_modules,
            )
            weights_location = offload_folder
    else:
        places = _places(model, device_map, no_split_module_classes, max_memory, config)
    return load_checkpoint_and_dispatch(
        model,
        weights_location,
        places,
        dtype=config.dtype,
        no_split_module_classes=no_split_module_classes,
        keep_in_fp32_modules=config.keep_in_fp32_modules,
    ).eval()


def _places(
    model: nn.Module,
    device_map: str | Mapping[str, Device] | None,
    no_split: Sequence[str] | str | None,
    max_memory: Mapping[Device, int | str] | None,
    config: BnbQuantizationConfig,
) -> Mapping[str, Device] | None:
    if isinstance(device_map, str):
        return plan_device_map(model, device_map, max_memory, no_split, config.dtype)
    if device_map is not None:
        check_device_map(model, device_map, must_exist=True)
    return device_map
