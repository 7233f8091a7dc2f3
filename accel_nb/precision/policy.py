"""The interface of a precision, and its record of dtypes."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer


@dataclass(frozen=True, slots=True)
class PrecisionPolicy:
    """Dtypes of one precision; None leaves the dtype as it is.

    ``param`` is the dtype of stored weights, ``compute`` the dtype of forward and backward passes, ``reduce`` the dtype
    in which gradients are averaged, ``output`` the dtype of a model's output. A strategy that has its own mixed
    precision translates this record.
    """

    name: str
    param: torch.dtype | None = None
    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    output: torch.dtype | None = None
    loss_scaling: bool = False


class Precision(Protocol):
    """Methods that a strategy calls to apply a policy."""

    policy: PrecisionPolicy

    @property
    def scaler(self) -> GradScaler | None:
        """PyTorch's scaler of losses; None where they are not scaled."""
        ...

    def autocast(self) -> AbstractContextManager[Any]:
        """Return a new context in which a forward pass computes in ``policy.compute``."""
        ...

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss to call backward on."""
        ...

    def unscale_(self, optimizer: Optimizer) -> None:
        """Undo `scale` in the optimizer's gradients; a second call before the next step does nothing."""
        ...

    def step(self, optimizer: Optimizer) -> bool:
        """Step the optimizer; return False if the gradients overflowed and the step was skipped."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs, as plain numbers."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that `state_dict` has returned."""
        ...
