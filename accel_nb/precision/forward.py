"""Forward passes of models under the autocast of a precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from accel_nb.precision.half import cast_half_floats
from accel_nb.precision.policy import Precision
from accel_nb.runtime.tensors.instance_patching import patch_instance, plain_view


def forward_in_precision(model: nn.Module, precision: Precision) -> Callable[..., Any]:
    """Return a function that runs the model's forward under the precision's autocast, and casts the output.

    If ``forward`` is set on the instance, that is the model's forward.
    """
    own = vars(model).get("forward")
    forward = own if own is not None else type(model).forward.__get__(model)
    output = precision.policy.output
    if precision.policy.compute is None:
        return forward
    autocast = precision.autocast

    def forward_with_autocast(*args: Any, **kwargs: Any) -> Any:
        with autocast():
            result = forward(*args, **kwargs)
        return result if output is None else cast_half_floats(result, output)

    return forward_with_autocast


def plain_view_in_precision(model: nn.Module, precision: Precision | None, *, keeps_inner: bool = False) -> nn.Module:
    """Return a `plain_view` of a model, with a forward that computes in ``precision``, or with None unchanged."""
    view = plain_view(model, keeps_inner=keeps_inner)
    if precision is None or precision.policy.compute is None:
        return view
    forward = forward_in_precision(view, precision)
    vars(view).pop("forward", None)
    return patch_instance(view, {"forward": lambda self, *args, **kwargs: forward(*args, **kwargs)})
