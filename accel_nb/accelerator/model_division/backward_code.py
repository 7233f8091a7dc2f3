"""Detection of code in a forward pass that affects the backward pass: checkpointing, autograd functions, hooks.

Inside of a divided call the gradients belong to this rank's rows, and are multiplied by the number of ranks. Code that
clips or stores them would see other values than on one device. Parts that checkpointing computes again run outside of
the divided call. Code that trains inside of its forward pass must not run in calls that are undone: the state of
optimizers stays.
"""

from __future__ import annotations

import cProfile
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch.utils.checkpoint
from torch.autograd import Function
from torch.optim import Optimizer

from accel_nb.runtime.process.user_code import is_user_module

_CHECKPOINT = torch.utils.checkpoint.__file__
# Python code up to torch 2.14, a builtin from 2.15 on.
_APPLY = getattr(getattr(Function.apply, "__func__", None), "__code__", None)
_HOOK = torch.Tensor.register_hook.__code__


class TrainsInForward(BaseException):
    """Raised if a forward pass starts a backward pass or steps an optimizer; ``except Exception`` does not catch it."""


class BackwardCode:
    """Observes the calls in the block of `observe`.

    `TrainsInForward` is raised inside of the block where its code is about to run a backward pass or an optimizer's
    step.

    Attributes:
        has_checkpoints: whether a function of `torch.utils.checkpoint` was called, by whatever name.
        has_own_gradients: whether the user's code applied an `autograd.Function` of its own or registered a hook on a
            tensor.
    """

    def __init__(self) -> None:
        self.has_checkpoints = self.has_own_gradients = False
        # In plain cells these are replacements of torch's functions.
        self._backward = {torch.Tensor.backward.__code__, torch.autograd.backward.__code__}

    @contextmanager
    def observe(self) -> Iterator[None]:
        """Observe calls inside of the block."""
        earlier = sys.getprofile()
        sys.setprofile(self._observe)
        try:
            yield
        finally:
            if isinstance(earlier, cProfile.Profile):  # up to Python 3.11: C code has installed it
                earlier.enable()
            else:
                sys.setprofile(earlier)

    def _observe(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            self._observe_call(frame)
        elif event == "c_call" and getattr(argument, "__name__", None) == "apply":
            self._observe_apply(getattr(argument, "__self__", None))

    def _observe_call(self, frame: FrameType) -> None:
        code = frame.f_code
        if code is _APPLY:
            self._observe_apply(frame.f_locals["cls"])
        elif code is _HOOK:
            self.has_own_gradients |= is_user_module(_caller_of(frame))
        elif code.co_filename == _CHECKPOINT:
            self.has_checkpoints = True
        elif code in self._backward or (code.co_name == "step" and isinstance(_first_argument(frame), Optimizer)):
            raise TrainsInForward

    def _observe_apply(self, called_on: Any) -> None:
        if isinstance(called_on, type) and issubclass(called_on, Function):
            self.has_own_gradients |= is_user_module(called_on.__module__)


def _first_argument(frame: FrameType) -> Any:
    code = frame.f_code
    return frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None


def _caller_of(frame: FrameType) -> str | None:
    """Return the name of the module that called a function, whose replacement by this package may have called it."""
    caller = frame.f_back
    while caller is not None:
        name = caller.f_globals.get("__name__", "")
        if not name.startswith("accel_nb."):
            return name
        caller = caller.f_back
    return None
