"""Sizes of a model's weights and of its optimizer's state. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from accel_nb.config.message_text import did_you_mean
from accel_nb.errors import ConfigError


@dataclass(frozen=True, slots=True)
class WeightSize:
    """One parameter; a tied parameter counts once. ``itemsize`` and ``state_bytes`` are in bytes.

    ``block`` is the name of the repeated block of the model that contains it; None outside of blocks.
    ``state_bytes`` is the optimizer's state for the full weight between steps.
    """

    name: str
    shape: tuple[int, ...]
    itemsize: int = 4
    is_trainable: bool = True
    block: str | None = None
    state_bytes: int = 0

    @property
    def num_values(self) -> int:
        """The number of values, 1 for a scalar."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """A model with its optimizer. ``step_bytes`` are temporary tensors of `optimizer.step()`, not divided."""

    name: str
    weights: tuple[WeightSize, ...]
    buffer_bytes: int = 0
    optimizer: str = "none"
    step_bytes: int = 0

    @property
    def num_parameters(self) -> int:
        """The values of all weights."""
        return sum(weight.num_values for weight in self.weights)

    @property
    def num_trainable(self) -> int:
        """The values of the weights that are trained."""
        return sum(weight.num_values for weight in self.weights if weight.is_trainable)


@dataclass(frozen=True, slots=True)
class OptimizerKind:
    """The numbers of values that an optimizer keeps, and allocates temporarily in a step, for each value of a weight.

    They have the dtype of the weight. ``num_scratch`` is for torch's implementation over lists of tensors, its default
    on GPUs.
    """

    num_kept: int
    num_scratch: int


OPTIMIZERS: Mapping[str, OptimizerKind] = MappingProxyType(
    {
        "sgd": OptimizerKind(0, 0),
        "sgd-momentum": OptimizerKind(1, 0),
        "adagrad": OptimizerKind(1, 2),
        "rmsprop": OptimizerKind(1, 1),
        "adam": OptimizerKind(2, 1),
        "adamw": OptimizerKind(2, 1),
    }
)
"""Optimizers that can be chosen by name; `accel_nb.forecast.measurement` measures an optimizer object."""


def with_optimizer(model: ModelSizes, name: str) -> ModelSizes:
    """Return the model as trained by one of `OPTIMIZERS`; raises `ConfigError` for another name."""
    kind = OPTIMIZERS.get(name.lower())
    if kind is None:
        near = did_you_mean(name.lower(), list(OPTIMIZERS))
        raise ConfigError(f"optimizer {name[:80]!a} is unknown; known are {', '.join(OPTIMIZERS)}{near}")
    weights = [
        replace(weight, state_bytes=weight.num_values * weight.itemsize * kind.num_kept * weight.is_trainable)
        for weight in model.weights
    ]
    trained = sum(weight.num_values * weight.itemsize for weight in weights if weight.is_trainable)
    return replace(model, weights=tuple(weights), optimizer=name.lower(), step_bytes=trained * kind.num_scratch)


def count_text(count: int) -> str:
    """Return a number of parameters as text: ``124 M``."""
    for factor, unit in ((10**9, " G"), (10**6, " M"), (10**3, " k")):
        if count >= factor:
            return f"{count / factor:.3g}{unit}"
    return str(count)
