"""Records of models at the time when they were prepared, to detect later changes."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor, nn

from accel_nb.accelerator.training.model_code import ModelCode, code_in, code_of, is_changed


class RecordedModels:
    """Records the code and the named parameters of models. Methods take recorded models only."""

    def __init__(self) -> None:
        self._code: dict[int, tuple[frozenset[type], ModelCode]] = {}
        # By model id: its parameters with their dtypes and whether they required gradients. Only the gradients of those
        # that did are averaged.
        self._parameters: dict[int, list[tuple[Tensor, torch.dtype, bool]]] = {}
        self._names: dict[int, list[tuple[str, int]]] = {}

    def record(self, model: nn.Module) -> None:
        """Record the current code and parameters of a model."""
        self._code[id(model)] = code_in(model)
        self._names[id(model)] = _names_in(model)
        self._parameters[id(model)] = [(value, value.dtype, value.requires_grad) for value in model.parameters()]

    def remove(self, ids: Iterable[int]) -> None:
        """Remove the records of the models with these ids; other ids are ignored."""
        for key in ids:
            self._code.pop(key, None)
            self._names.pop(key, None)
            self._parameters.pop(key, None)

    def trainable(self, model: nn.Module) -> dict[int, torch.dtype]:
        """Return the recorded dtypes of the parameters that required gradients, by the ids of the parameters."""
        return {id(value): dtype for value, dtype, requires_grad in self._parameters[id(model)] if requires_grad}

    def has_changed(self, model: nn.Module, *, compares_names: bool) -> bool:
        """Return whether trainable parameters, their dtypes, or functions of the model's classes have changed.

        With ``compares_names`` also whether a parameter has another name.
        """
        return (
            self.trainable(model) != _trainable_in(model)
            or is_changed(self._code[id(model)][1], code_in(model)[1])
            or (compares_names and self._names[id(model)] != _names_in(model))
        )

    def is_outdated(self, models: Collection[nn.Module], *, compares_parameters: bool) -> bool:
        """Return whether code, or with ``compares_parameters`` dtype or ``requires_grad`` of a parameter, changed."""
        # Called before each statement that could train: it visits classes and parameters, not the modules.
        if any(is_changed(code, code_of(classes)) for classes, code in (self._code[id(model)] for model in models)):
            return True
        return compares_parameters and any(
            value.dtype != dtype or value.requires_grad != requires_grad
            for model in models
            for value, dtype, requires_grad in self._parameters[id(model)]
        )


def _names_in(model: nn.Module) -> list[tuple[str, int]]:
    """Return the parameters by their names, under which a strategy that shards them puts them into the model."""
    return [(name, id(value)) for name, value in model.named_parameters(remove_duplicate=False)]


def _trainable_in(model: nn.Module) -> dict[int, torch.dtype]:
    return {id(value): value.dtype for value in model.parameters() if value.requires_grad}
