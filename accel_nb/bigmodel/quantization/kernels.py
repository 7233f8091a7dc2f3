"""Quantization of linear layers' weights into plain tensors, and computation with them, by torchao or bitsandbytes.

The libraries represent a quantized weight as an object of their own classes. A kernel converts it to plain tensors,
which files, device maps and offloading support, and restores it for each computation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from accel_nb.errors import ConfigError
from accel_nb.runtime.process.requirements import unmet_extra

MethodName = Literal["int8", "int8_dynamic", "int4", "bnb_int8", "nf4", "fp4"]
METHODS: tuple[MethodName, ...] = get_args(MethodName)
_PACKAGES: Mapping[str, str] = {
    "int8": "torchao", "int8_dynamic": "torchao", "int4": "torchao",
    "bnb_int8": "bitsandbytes", "nf4": "bitsandbytes", "fp4": "bitsandbytes",
}  # fmt: skip

_INT4: Any = getattr(torch, "int4")  # noqa: B009  (torch does not declare it)

QuantizedParts = Mapping[str, Tensor]
"""The tensors of a quantized weight, by name."""


@dataclass(frozen=True)
class Quantization:
    """The method of quantizing linear layers, and the layers to skip.

    ``int8`` and ``int4`` quantize weights only and compute in floating point; ``int8_dynamic`` quantizes inputs too,
    for each forward, and computes in int8 (all three by torchao). ``bnb_int8`` computes in int8 except for outliers
    beyond ``threshold``; ``nf4`` and ``fp4`` store four bits (these by bitsandbytes). ``group_size`` weights share a
    scale (int4, nf4, fp4); ``nested`` quantizes the scales of nf4 and fp4 too. ``skip_modules`` are names, or parts of
    names between dots, of layers that are skipped (None: tied ones and the last, the head).
    """

    method: MethodName = "int8"
    group_size: int = 64
    threshold: float = 6.0
    nested: bool = False
    skip_modules: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        problems: list[str] = []
        if self.method not in METHODS:
            problems.append(f"quantization {self.method!r} is unknown; there are {', '.join(METHODS)}")
        if type(self.group_size) is not int or self.group_size not in (32, 64, 128, 256):
            problems.append(f"group_size is {self.group_size!r}; allowed are 32, 64, 128 and 256 weights")
        if not self.threshold >= 0:
            problems.append(f"threshold is {self.threshold!r}; give a number from 0")
        if problems:
            raise ConfigError(problems)

    @property
    def package(self) -> str:
        """The library that implements the method."""
        return _PACKAGES[self.method]


class Kernel(Protocol):
    """Quantization of, and computation with, the weight of one layer."""

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        """Return the parts of a quantized weight, on its device (the meta device too)."""
        ...

    def linear(self, x: Tensor, parts: QuantizedParts, bias: Tensor | None) -> Tensor:
        """Return the output of the layer."""
        ...


def build_kernel(quantization: Quantization, shape: tuple[int, int], dtype: torch.dtype) -> Kernel:
    """Return the kernel for a layer of ``shape`` (out, in) that computes in ``dtype``; raises `ConfigError`."""
    if (problem := unmet_extra("quantize", quantization.package)) is not None:
        raise ConfigError(f"quantization {quantization.method!r}: {problem}")
    if quantization.method == "bnb_int8":
        return _BitsAndBytes8(quantization.threshold)
    if quantization.method in ("nf4", "fp4"):
        return _BitsAndBytes4(quantization, shape, dtype)
    if quantization.method == "int4":
        if shape[1] % quantization.group_size:
            raise ConfigError(
                f"its {shape[1]} inputs are not a multiple of group_size={quantization.group_size}; give another "
                "group_size, or its name in skip_modules"
            )
        return _PackedInt4(quantization, shape, dtype)
    return _Torchao(quantization, shape, dtype)


class _Torchao:
    """A tensor subclass of torchao, with its own operations."""

    def __init__(self, quantization: Quantization, shape: tuple[int, int], dtype: torch.dtype) -> None:
        self._quantization = quantization
        like = self._quantized(torch.empty(shape, dtype=dtype, device="meta"))
        self._names, self._context = like.__tensor_flatten__()
        self._type: Any = type(like)

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        made = self._quantized(weight)
        return {name: getattr(made, name).detach() for name in self._names}

    def linear(self, x: Tensor, parts: QuantizedParts, bias: Tensor | None) -> Tensor:
        inner = {name: parts[name].detach() for name in self._names}
        return functional.linear(x, self._type.__tensor_unflatten__(inner, self._context, None, None), bias)

    def _quantized(self, weight: Tensor) -> Any:
        from torchao import quantization as ao

        config: Any
        if self._quantization.method == "int8":
            config = ao.Int8WeightOnlyConfig()
        elif self._quantization.method == "int8_dynamic":
            config = ao.Int8DynamicActivationInt8WeightConfig()
        else:
            config = ao.IntxWeightOnlyConfig(_INT4, ao.PerGroup(self._quantization.group_size))
        layer = nn.Linear(1, 1, bias=False, device="meta")
        layer.weight = nn.Parameter(weight.detach(), requires_grad=False)
        layer.in_features, layer.out_features = weight.shape[1], weight.shape[0]
        ao.quantize_(holder := nn.Sequential(layer), config)
        made: Any = holder[0].weight
        return made


class _PackedInt4:
    """torchao's int4, stored as two weights per byte; it takes a byte per weight during computation."""

    def __init__(self, quantization: Quantization, shape: tuple[int, int], dtype: torch.dtype) -> None:
        self._bytes = _Torchao(quantization, shape, dtype)

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        parts = self._bytes.quantize(weight)
        shifted = (parts["qdata"] + 8).to(torch.uint8)
        return {**parts, "qdata": shifted[:, ::2] | (shifted[:, 1::2] << 4)}

    def linear(self, x: Tensor, parts: QuantizedParts, bias: Tensor | None) -> Tensor:
        packed = parts["qdata"].detach()
        shifted = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
        return self._bytes.linear(x, {**parts, "qdata": shifted.to(torch.int8) - 8}, bias)


class _BitsAndBytes8:
    """bitsandbytes' int8: a scale per row, inputs quantized in each forward, outliers in 16 bits."""

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        from bitsandbytes import functional as bnb

        rows, scales, _ = bnb.int8_vectorwise_quant(weight.detach().to(torch.float16))
        return {"rows": rows, "scales": scales}

    def linear(self, x: Tensor, parts: QuantizedParts, bias: Tensor | None) -> Tensor:
        from bitsandbytes.autograd._functions import MatmulLtState, matmul

        rows: Any = parts["rows"].detach()
        state: Any = MatmulLtState()
        state.CB, state.SCB, state.has_fp16_weights = rows, parts["scales"].detach(), False
        output: Any = matmul(x, rows, state=state, threshold=self._threshold, bias=bias)
        return output


class _BitsAndBytes4:
    """bitsandbytes' 4-bit formats: a scale per block of weights, optionally quantized itself."""

    def __init__(self, quantization: Quantization, shape: tuple[int, int], dtype: torch.dtype) -> None:
        self._quantization = quantization
        self._shape = torch.Size(shape)
        self._dtype = dtype

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        from bitsandbytes import functional as bnb

        state: Any
        packed, state = bnb.quantize_4bit(
            weight.detach(),
            blocksize=self._quantization.group_size,
            compress_statistics=self._quantization.nested,
            quant_type=self._quantization.method,
        )
        parts = {"packed": packed, "scales": state.absmax, "code": state.code}
        if state.nested:
            parts |= {"offset": state.offset, "scale_scales": state.state2.absmax, "scale_code": state.state2.code}
        return {name: part.to(weight.device) for name, part in parts.items()}

    def linear(self, x: Tensor, parts: QuantizedParts, bias: Tensor | None) -> Tensor:
        from bitsandbytes import functional as bnb

        known = {name: part.detach() for name, part in parts.items()}
        second = None
        if "offset" in known:
            second = bnb.QuantState(
                absmax=known["scale_scales"], code=known["scale_code"], blocksize=256, dtype=torch.float32
            )
        state = bnb.QuantState(
            absmax=known["scales"],
            shape=self._shape,
            code=known["code"],
            blocksize=self._quantization.group_size,
            quant_type=self._quantization.method,
            dtype=self._dtype,
            offset=known.get("offset"),
            state2=second,
        )
        weight = bnb.dequantize_4bit(known["packed"], state).to(x.dtype)
        return functional.linear(x, weight, None if bias is None else bias.to(x.dtype))
