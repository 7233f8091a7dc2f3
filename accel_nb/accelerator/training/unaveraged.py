"""Parameters that an optimizer steps although their gradients are not averaged over ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from accel_nb.accelerator.training.parameter_names import name_in_namespace


class UnaveragedParameter(NamedTuple):
    """A parameter with its position in a group of an optimizer."""

    group: int
    position: int
    parameter: Tensor

    @property
    def has_gradient(self) -> bool:
        """Whether a step would use a gradient of this rank alone."""
        return self.parameter.requires_grad and self.parameter.grad is not None

    def describe(self, namespace: Mapping[str, Any], num_workers: int) -> str:
        """Return the text of the error: the parameter, and how to change the code."""
        name = name_in_namespace(self.parameter, namespace)
        return (
            f"parameter {self.position} of group {self.group} of the optimizer"
            + (f" ({name})" if name else "")
            + f", of shape {tuple(self.parameter.shape)}, belongs to no prepared model, or was frozen when its model "
            f"was prepared, so its gradient is not averaged over the {num_workers} workers and its values would "
            "diverge. Put it into a module that is prepared (assign it to an attribute of one before preparing), "
            "prepare the model again after unfreezing (free_memory(model) first), or set requires_grad=False on it"
        )


def find_unaveraged(optimizer: Optimizer, averaged_ids: Set[int]) -> Sequence[UnaveragedParameter]:
    """Return the parameters of an optimizer whose ids are not in ``averaged_ids``."""
    return [
        UnaveragedParameter(number, position, parameter)
        for number, group in enumerate(optimizer.param_groups)
        for position, parameter in enumerate(group["params"])
        if id(parameter) not in averaged_ids
    ]
