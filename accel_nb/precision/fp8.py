"""8-bit floating point by torchao: linear layers multiply in float8, all other layers compute as in bf16.

Each layer gets a separate subclass with another forward; its weight and the weight's dtype stay the same. Scales are
computed for each tensor (or row) in each call, so there is no state to save.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from accel_nb.config.sections import Fp8Options
from accel_nb.errors import ConfigError
from accel_nb.runtime.devices.registry import device_type
from accel_nb.runtime.process.requirements import unmet_extra
from accel_nb.runtime.tensors.instance_patching import plain_class, replace_forward, restore_forward

MULTIPLE = 16
"""Both dims of a weight must be divisible by this: the hardware multiplies tiles of that size."""

_MIN_COMPUTE_CAPABILITY: Mapping[str, tuple[int, int]] = MappingProxyType(
    {"tensorwise": (8, 9), "rowwise": (9, 0), "rowwise_with_gw_hp": (9, 0)}
)
_CASTING = "_accel_nb_casting"
_BENCHMARK_RUNS = 6
_PASSES_PER_RUN = 4


@dataclass(frozen=True)
class WeightCasting:
    """The cast of a weight to float8 in separate parts, with one scale for the whole weight."""

    dtype: torch.dtype
    settings: Any
    """torchao's settings of a multiplication by the weight."""

    def scales(self, amax: Tensor) -> Tensor:
        """Return the scales of weights, from the largest absolute value in each weight."""
        from torchao.float8.float8_utils import amax_to_scale

        return amax_to_scale(amax, self.dtype)

    def cast(self, part: Tensor, scale: Tensor) -> Tensor:
        """Return the float8 values of a part."""
        from torchao.float8.float8_training_tensor import GemmInputRole, hp_tensor_and_scale_to_float8

        converted: Any = hp_tensor_and_scale_to_float8(part, scale, self.dtype, self.settings, GemmInputRole.WEIGHT)
        return converted._data

    def to_float8_tensor(self, values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """Return torchao's tensor of float8 values, by which a layer multiplies; its ``dtype`` is the given one."""
        from torchao.float8 import float8_training_tensor

        kind: Any = float8_training_tensor.Float8TrainingTensor
        role = float8_training_tensor.GemmInputRole.WEIGHT
        return kind(values, scale, dtype, self.settings, gemm_input_role=role)


def get_weight_casting(module: nn.Module) -> WeightCasting | None:
    """Return how an all-gather casts the weight of a converted layer; None for other modules and recipes."""
    return getattr(type(module), _CASTING, None)


class Float8Layers:
    """Makes the linear layers of models multiply in float8, in place.

    Raises `ConfigError` where torchao is not installed, and on hardware without float8 unless it is emulated.
    """

    def __init__(self, device: torch.device, options: Fp8Options) -> None:
        if not options.emulate:
            problem = why_no_float8(device, options.recipe)
            if problem is not None:
                raise ConfigError(
                    f"precision fp8 is not available: {problem}; use bf16, or fp8.emulate to test, slowly, how a model "
                    "trains in it"
                )
        self._device = device
        self._options = options
        self._multiply, self._casting = _build_multiplication(options)
        self._converted: dict[int, list[nn.Linear]] = {}
        self._num_linears: dict[int, int] = {}
        self._benchmarks: dict[int, str] = {}

    def apply(self, model: nn.Module, compiled: Callable[[Any], Any] = lambda function: function) -> None:
        """Convert a model's layers, before it is compiled and wrapped.

        ``compiled`` returns a function compiled as models are; the benchmark measures such functions.
        """
        if id(model) in self._converted:
            return
        layers = self._converted[id(model)] = find_layers(model, self._options.skip_modules)
        self._num_linears[id(model)] = len(_linears(model))
        if self._options.trial_rows and layers:
            self._benchmarks[id(model)] = self._run_benchmark(layers, compiled)
        for layer in layers:
            replace_forward(layer, _forward(layer, self._multiply))
            setattr(type(layer), _CASTING, self._casting)

    def undo(self, model: nn.Module) -> None:
        """Restore the forward of the layers, after the model is unwrapped and no longer compiled."""
        self._benchmarks.pop(id(model), None)
        for layer in self._converted.pop(id(model), ()):
            restore_forward(layer)

    def describe(self, model: nn.Module) -> list[str]:
        """Return lines about the layers in float8 and the benchmark; none for a model that is not converted."""
        layers = self._converted.get(id(model))
        if layers is None:
            return []
        kind, options = type(model).__name__, self._options
        if not layers:
            skipped = "its first and last" if options.skip_modules is None else "those of fp8.skip_modules"
            return [f"fp8 has no effect on {kind}: except {skipped}, no linear layer has dims divisible by {MULTIPLE}"]
        how = f"{options.recipe}, emulated: slow" if options.emulate else options.recipe
        where = f"{len(layers)} of {self._num_linears[id(model)]} linear layers of {kind}"
        found = [f"fp8 ({how}) in {where}, the rest in bf16"]
        return [*found, self._benchmarks[id(model)]] if id(model) in self._benchmarks else found

    def _run_benchmark(self, layers: Sequence[nn.Linear], compiled: Callable[[Any], Any]) -> str:
        """Time forward and backward passes of the layers, one of each shape, in bfloat16 and in float8."""
        rows, spent = self._options.trial_rows, {"bf16": 0.0, "fp8": 0.0}
        for (outputs, inputs), count in Counter(tuple(layer.weight.shape) for layer in layers).items():
            x = torch.ones(rows, inputs, dtype=torch.bfloat16, device=self._device, requires_grad=True)
            weight = torch.full((outputs, inputs), 0.5, device=self._device, requires_grad=True)
            variants: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
                "bf16": lambda x, weight: functional.linear(x, weight.to(torch.bfloat16)),
                "fp8": lambda x, weight: self._multiply(x, weight),
            }
            for name, multiply in variants.items():
                spent[name] += count * _measure_seconds(compiled(multiply), x, weight, self._device)
        ratio = spent["bf16"] / spent["fp8"]
        verdict = f"{ratio:.2f} times as fast as" if ratio >= 1 else f"{1 / ratio:.2f} times as slow as"
        advice = "" if ratio >= 1 else ": --precision bf16 is the better choice here"
        return f"benchmark of {len(layers)} layers on {rows} rows: fp8 is {verdict} bf16{advice}"


def why_no_float8(device: torch.device, recipe: str) -> str | None:
    """Return why a device does not multiply in float8 by a recipe; None if it does."""
    kind, first = device_type(device), _MIN_COMPUTE_CAPABILITY[recipe]
    found = kind.compute_capability(device)
    if found is None:
        return f"the {kind.name} has no float8 arithmetic"
    if found >= first:
        return None
    return (
        f"{kind.device_name(device)} has compute capability {found[0]}.{found[1]}, and the recipe {recipe} "
        f"needs at least {first[0]}.{first[1]}"
    )


def find_layers(model: nn.Module, skip: Sequence[str] | None) -> list[nn.Linear]:
    """Return the linear layers to convert, each once, in the model's order.

    Their dims are divisible by 16, and their dotted names have no component, or sequence of components, in ``skip``.
    With None the first and the last linear layer of the model are left out, whatever their dims are: rounding harms the
    layers next to the data and the loss most.
    """
    linears = _linears(model)
    names = list(linears)[1:-1] if skip is None else list(linears)
    return [
        linears[name]
        for name in names
        if not any(f".{part}." in f".{name}." for part in skip or ())
        and all(size % MULTIPLE == 0 for size in linears[name].weight.shape)
    ]


def _linears(model: nn.Module) -> dict[str, nn.Linear]:
    # Subclasses are left out: they may use their weights in other ways than by calling the layer.
    return {
        name: part
        for name, part in model.named_modules()
        if isinstance(part, nn.Linear) and plain_class(part) is nn.Linear
    }


def _forward(layer: nn.Linear, multiply: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def forward_in_fp8(x: Tensor) -> Tensor:
        if x.numel() == 0:  # an empty tensor has no largest value for a scale
            weight: Any = layer.weight
            if hasattr(weight, "to_original_precision"):  # the weight was gathered in float8
                return functional.linear(x.to(weight.dtype), weight.to_original_precision(), layer.bias)
            return nn.Linear.forward(layer, x)
        result = multiply(x.to(torch.bfloat16), layer.weight)
        return result if layer.bias is None else result + layer.bias.to(result.dtype)

    return forward_in_fp8


def _build_multiplication(options: Fp8Options) -> tuple[Callable[[Tensor, Tensor], Tensor], WeightCasting | None]:
    """Return a function that multiplies rows by a weight, (..., inputs) x (outputs, inputs), also in its backward pass.

    The second value casts separate parts of a weight; None for recipes in which a weight has several scales.
    """
    if (problem := unmet_extra("fp8", "torchao")) is not None:
        raise ConfigError(f"precision fp8: {problem}")
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

    recipe = Float8LinearConfig.from_recipe_name(options.recipe)
    # Rows are padded where their number is not divisible by 16, since the weight's gradient sums over them.
    config = replace(recipe, emulate=options.emulate, pad_inner_dim=True)
    made: Any = convert_to_float8_training(nn.Linear(MULTIPLE, MULTIPLE, device="meta"), config=config)
    settings = made.linear_mm_config

    def multiply(x: Tensor, weight: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return matmul_with_hp_or_float8_args.apply(x, weight.t(), settings, config)

    weight: Any = config.cast_config_weight
    is_whole = options.recipe == "tensorwise"
    return multiply, WeightCasting(weight.target_dtype, settings) if is_whole else None


def _measure_seconds(
    multiply: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor, device: torch.device
) -> float:
    """Return the seconds of a forward and backward pass: the fastest of several runs, the first of which warm up."""
    times: list[float] = []
    for _ in range(_BENCHMARK_RUNS):
        start = time.perf_counter()
        for _ in range(_PASSES_PER_RUN):
            torch.autograd.backward(multiply(x, weight).sum())
        device_type(device).synchronize(device)
        times.append(time.perf_counter() - start)
    x.grad = weight.grad = None
    return min(times) / _PASSES_PER_RUN
