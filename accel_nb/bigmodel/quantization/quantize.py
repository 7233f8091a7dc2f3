"""Linear layers with quantized weights, and a report of the memory saved and the error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from accel_nb.bigmodel.host_memory import empty_tensors, trim_heap
from accel_nb.bigmodel.planning.sizes import list_tensors, matches_name, parse_dtype
from accel_nb.bigmodel.quantization.kernels import Kernel, Quantization, build_kernel
from accel_nb.config.byte_sizes import size_text
from accel_nb.errors import ConfigError

_PROBE_ROWS = 8
_USE_WEIGHTS_OF_CHILDREN = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
"""torch modules that use the weights of their children without calling them."""


class QuantizedLinear(nn.Module):
    """A linear layer with a quantized weight, whose parts are frozen parameters."""

    def __init__(self, layer: nn.Linear, quantization: Quantization, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.quantization = quantization
        self.dtype = dtype or layer.weight.dtype
        self.kernel: Kernel = build_kernel(quantization, (layer.out_features, layer.in_features), self.dtype)
        self.part_names: tuple[str, ...] = ()
        self.error: float | None = None
        """Relative error of outputs for random inputs, compared with the unquantized weight."""
        self.quantize_weight(layer.weight)
        self.bias = layer.bias

    def quantize_weight(self, weight: Tensor) -> None:
        """Quantize a weight (out, in) on its device and register the parts."""
        weight = weight.detach().to(self.dtype)
        parts = self.kernel.quantize(weight)
        self.part_names = tuple(parts)
        self.measure_error(weight, parts)
        for name, part in zip(parts, _copy_to_compact_memory(list(parts.values())), strict=True):
            self.register_parameter(name, nn.Parameter(part, requires_grad=False))
        if not weight.is_meta:
            trim_heap()  # return temporaries to the system, or the peak grows with each layer

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., out) for (..., in)."""
        return self.kernel.linear(x, {name: self._parameters[name] for name in self.part_names}, self.bias)  # type: ignore[misc]

    def extra_repr(self) -> str:
        """Return the description in a printed model."""
        return f"in_features={self.in_features}, out_features={self.out_features}, {', '.join(self.part_names)}"

    def measure_error(self, weight: Tensor, parts: Mapping[str, Tensor]) -> None:
        """Measure the error of a quantized weight; does nothing on the meta device."""
        if weight.is_meta:
            return
        rows = torch.randn(_PROBE_ROWS, self.in_features, generator=torch.Generator().manual_seed(0), device="cpu")
        with torch.inference_mode():
            x = rows.to(weight.device, weight.dtype)
            exact = nn.functional.linear(x, weight).float()
            made = self.kernel.linear(x, parts, None).float()
        self.error = float((made - exact).norm() / exact.norm().clamp_min(1e-30))


@dataclass(frozen=True)
class QuantizationReport:
    """The memory that quantization saved, and its errors."""

    method: str
    layers: int
    nbytes: int
    nbytes_before: int
    """Size of the same weights in the dtype of the computation."""
    errors: Mapping[str, float] = field(default_factory=dict)
    """Relative error of the outputs for random inputs, by layer; without layers that were loaded quantized."""

    def __str__(self) -> str:
        text = (
            f"{self.layers} linear layers as {self.method}: {size_text(self.nbytes)} instead of "
            f"{size_text(self.nbytes_before)}"
        )
        if self.errors:
            worst = max(self.errors, key=lambda name: self.errors[name])
            mean = sum(self.errors.values()) / len(self.errors)
            text += f"; outputs of a layer have a mean relative error of {mean:.2%}, at most "
            text += f"{self.errors[worst]:.2%} ({worst})"
        return text


def quantize_model(
    model: nn.Module,
    quantization: str | Quantization,
    *,
    dtype: torch.dtype | str | None = None,
    keep_in_fp32_modules: Sequence[str] = (),
) -> nn.Module:
    """Replace linear layers by quantized ones, one at a time; returns the model, changed in place.

    On the meta device nothing is computed: weights are then quantized while a checkpoint is loaded. ``dtype`` is the
    dtype of the computation (None: the layers' own). Layers of ``keep_in_fp32_modules`` are skipped too; their dtype
    stays. Raises `ConfigError` with all problems, and then changes nothing.
    """
    options = as_quantization(quantization)
    names = _choose_layers(model, options, keep_in_fp32_modules)
    replace_linear_layers(model, options, names, None if dtype is None else parse_dtype(dtype))
    return model


def report_quantization(model: nn.Module) -> QuantizationReport:
    """Return the number of quantized layers, the memory saved, and the errors."""
    found = quantized_layers(model)
    return QuantizationReport(
        method=next((layer.quantization.method for layer in found.values()), "nothing"),
        layers=len(found),
        nbytes=sum(
            part.numel() * part.dtype.itemsize
            for layer in found.values()
            for part in (layer.get_parameter(name) for name in layer.part_names)
        ),
        nbytes_before=sum(
            layer.in_features * layer.out_features * layer.dtype.itemsize for layer in found.values()
        ),
        errors={name: layer.error for name, layer in found.items() if layer.error is not None},
    )  # fmt: skip


def quantized_layers(model: nn.Module) -> dict[str, QuantizedLinear]:
    """Return the quantized layers of a model by name."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, QuantizedLinear)}


def as_quantization(given: str | Quantization) -> Quantization:
    """Return the options for the name of a method."""
    return given if isinstance(given, Quantization) else Quantization(given)  # type: ignore[arg-type]


def _choose_layers(model: nn.Module, quantization: Quantization, kept: Sequence[str]) -> list[str]:
    """Return the names of the layers to quantize; raises `ConfigError` if there are none, or a name matches nothing."""
    paths = _names_by_module(model)

    def is_named(name: str, patterns: Sequence[str]) -> bool:
        own_paths = paths[id(model.get_submodule(name))]
        return any(matches_name(path, pattern) for path in own_paths for pattern in patterns)

    tied = {name.rpartition(".")[0] for held in list_tensors(model) if len(held.names) > 1 for name in held.names}
    parents = [name for name, module in model.named_modules() if isinstance(module, _USE_WEIGHTS_OF_CHILDREN)]
    linear = [
        name
        for name, module in model.named_modules()
        if name
        and type(module) is nn.Linear
        and not any(not parent or name.startswith(f"{parent}.") for parent in parents)
    ]
    if quantization.skip_modules is None:
        chosen = [name for name in linear[:-1] if name not in tied]
        chosen += [name for name in linear[-1:] if name not in tied and not _is_head(model, name)]
    else:
        chosen = [name for name in linear if not is_named(name, quantization.skip_modules)]
    chosen = [name for name in chosen if not is_named(name, kept)]
    problems: list[str] = []
    names = {name for own_paths in paths.values() for name in own_paths}
    for option, given in (("skip_modules", quantization.skip_modules or ()), ("keep_in_fp32_modules", kept)):
        if wrong := [pattern for pattern in given if not any(matches_name(name, pattern) for name in names)]:
            problems.append(f"{option} has names that match no module of the model: {', '.join(wrong)}")
    if not chosen:
        problems.append("no linear layer is left to quantize; see skip_modules and keep_in_fp32_modules")
    if problems:
        raise ConfigError(problems)
    return chosen


def _names_by_module(model: nn.Module) -> dict[int, list[str]]:
    """Return all names of each module, by its id: a model may have one module at several places."""
    names: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(name)
    return names


def _is_head(model: nn.Module, name: str) -> bool:
    """Return whether the last linear layer is outside of the repeated blocks."""
    return not any(part.isdigit() for part in name.split("."))


def _copy_to_compact_memory(parts: list[Tensor]) -> list[Tensor]:
    """Return CPU copies in separate memory, so that the allocator can free the temporaries."""
    if any(not part.is_cpu for part in parts):
        return parts
    kept = empty_tensors([(part.shape, part.dtype) for part in parts])
    return [memory.copy_(part) for memory, part in zip(kept, parts, strict=True)]


def replace_linear_layers(
    model: nn.Module, quantization: Quantization, names: Sequence[str], dtype: torch.dtype | None
) -> None:
    """Replace linear layers by quantized ones.

    Raises `ConfigError` with those that cannot be quantized, and then replaces none.
    """
    layers: dict[str, Any] = {name: model.get_submodule(name) for name in names}
    problems: list[str] = []
    for name, layer in layers.items():
        try:
            build_kernel(quantization, (layer.out_features, layer.in_features), dtype or layer.weight.dtype)
        except ConfigError as error:
            problems += [f"{name} cannot be quantized: {problem}" for problem in error.problems]
    if problems:
        raise ConfigError(problems)
    paths = _names_by_module(model)
    for name in names:  # a replaced layer is freed before the next one is quantized
        layer = layers.pop(name)
        replacement = QuantizedLinear(layer, quantization, dtype).train(layer.training)
        for each in paths[id(layer)]:
            owner, _, attribute = each.rpartition(".")
            setattr(model.get_submodule(owner), attribute, replacement)
        del layer
