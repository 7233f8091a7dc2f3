"""Layers that store weights in a small dtype and convert them to a larger one for each forward."""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from accel_nb.bigmodel.planning.sizes import parse_dtype
from accel_nb.errors import ConfigError

_LAYERS = (nn.Linear, nn.Embedding, nn.modules.conv._ConvNd)


def attach_layerwise_casting_hooks(
    module: nn.Module,
    storage_dtype: torch.dtype | str,
    compute_dtype: torch.dtype | str,
    skip_modules_pattern: str | Sequence[str] | None = None,
    skip_modules_classes: Sequence[type[nn.Module]] | None = None,
) -> None:
    """Store the weights of linear, embedding and convolution layers in one dtype, and compute in another.

    A layer's weights are converted for the duration of its forward; the stored ones do not change. Layers whose name
    matches a pattern (regular expression, searched) or that are of a given class are skipped.
    Raises `ConfigError` for dtypes that are not floating-point, or if no layer is left to convert.
    """
    stored, computed = parse_dtype(storage_dtype), parse_dtype(compute_dtype)
    if wrong := [dtype for dtype in (stored, computed) if not dtype.is_floating_point]:
        raise ConfigError(f"layers cannot be cast to {', '.join(map(str, wrong))}; give floating-point dtypes")
    patterns = [skip_modules_pattern] if isinstance(skip_modules_pattern, str) else list(skip_modules_pattern or ())
    layers = [
        layer
        for name, layer in module.named_modules()
        if isinstance(layer, _LAYERS)
        and not isinstance(layer, tuple(skip_modules_classes or ()))
        and not any(re.search(pattern, name) for pattern in patterns)
    ]
    if not layers:
        raise ConfigError("no linear, embedding or convolution layer is left to cast; see skip_modules_pattern")
    for layer in layers:
        for parameter in layer.parameters(recurse=False):
            parameter.data = parameter.data.to(stored)
        layer.forward = _CastingForward(layer, computed, layer.forward)


class _CastingForward:
    """The forward of a layer that uses its weights in ``dtype``; several threads may run it at once.

    An object, since copies and pickles of the layer must have their own forward.
    """

    def __init__(self, layer: nn.Module, dtype: torch.dtype, inner: Callable[..., Any]) -> None:
        functools.update_wrapper(self, inner)
        self._layer = layer
        self._dtype = dtype
        self._inner = inner
        self._lock = threading.Lock()
        self._kept: dict[str, Tensor] = {}
        self._num_running = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._layer, self._dtype, self._inner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        is_counted = False
        try:
            with self._lock:
                if not self._num_running:
                    self._convert()
                self._num_running += 1
                is_counted = True
            return self._inner(*args, **kwargs)
        finally:
            with self._lock:
                self._num_running -= is_counted
                if not self._num_running:
                    self._layer._parameters.update(self._kept)  # type: ignore[arg-type]
                    self._kept = {}

    def _convert(self) -> None:
        holder: dict[str, Any] = self._layer._parameters
        stored = {name: value for name, value in holder.items() if value is not None}
        converted = {name: value.to(self._dtype) for name, value in stored.items()}
        self._kept = stored
        holder.update(converted)
