"""Exclusion of this package's functions from torch.compile, which compiles only user code that calls divided models."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch
from torch._dynamo import trace_rules

from accel_nb.runtime.torch_private import is_checked

Function = TypeVar("Function", bound=Callable[..., Any])


def leave_uncompiled(function: Function) -> Function:
    """Return a function of this package that torch.compile leaves as it is; the user's code that it calls is compiled.

    On a torch that was not checked, the user's code that it calls is not compiled either.
    """
    if is_checked("compile.skip"):
        _skip_package()
        return function
    return torch.compiler.disable(function)  # pyright: ignore[reportReturnType]


@cache
def _skip_package() -> None:
    trace_rules.add(__name__.partition(".")[0])
