"""Hooks on the gradients of tensors that a plain cell registers."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor

from accel_nb.accelerator.model_division.divided_calls import DividedCalls
from accel_nb.accelerator.plain_cells.loss_proof.loss_check import LossCheck
from accel_nb.runtime.process.user_code import is_user_module


def replace_register_hook(
    loss_check: LossCheck, calls: DividedCalls, original: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a ``Tensor.register_hook`` that records calls by the user's code, not those by torch."""

    @functools.wraps(original)
    def register_hook(tensor: Tensor, hook: Callable[[Tensor], Any]) -> Any:
        if is_user_module(sys._getframe(1).f_globals.get("__name__")):
            loss_check.record_hook()
        return calls.related.register_hook(original, tensor, hook)

    return register_hook
