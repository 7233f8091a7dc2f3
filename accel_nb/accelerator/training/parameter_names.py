"""Names of parameters, for messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn


def name_in_models(models: Iterable[nn.Module], parameter: Tensor) -> str | None:
    """Return the name of a parameter in the first of ``models`` that has it, with the class if there are several."""
    listed = list(models)
    for model in listed:
        for name, candidate in model.named_parameters():
            if candidate is parameter:
                return f"{type(model).__name__}.{name}" if len(listed) > 1 else name
    return None


def name_in_namespace(parameter: Tensor, namespace: Mapping[str, Any]) -> str | None:
    """Return the name by which a notebook's namespace leads to a parameter, itself or in a model."""
    for name, value in dict(namespace).items():
        if value is parameter:
            return name
        if isinstance(value, nn.Module):
            for inner, candidate in value.named_parameters():
                if candidate is parameter:
                    return f"{name}.{inner}"
    return None
