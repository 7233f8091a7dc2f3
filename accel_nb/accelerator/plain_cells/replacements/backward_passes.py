"""Backward passes in plain cells, by whichever function of torch the code starts them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import GradientEdge

from accel_nb.accelerator.model_division.divided_calls import DividedCalls
from accel_nb.accelerator.plain_cells.loss_proof.loss_check import LossCheck
from accel_nb.accelerator.training.stepper import Stepper
from accel_nb.errors import MisuseError

Check = Callable[[Tensor, str | None], object]
"""Checks a loss before its backward pass.

Returns the reason if the losses of the ranks' shares do not combine to it.
"""


class BackwardPasses:
    """Replacements of ``Tensor.backward``, ``torch.autograd.backward`` and ``torch.autograd.grad``."""

    def __init__(self, stepper: Stepper, calls: DividedCalls, loss_check: LossCheck, check: Check) -> None:
        self._stepper = stepper
        self._calls = calls
        self._loss_check = loss_check
        self._check = check
        self.needs_check = False
        """Whether checks run before the next backward pass: the only flag for them that the hot path tests."""
        self.has_unused_gradients = False
        """Whether a backward pass has run since an optimizer, prepared or not, stepped last."""

    def wrap_method(self, original: Callable[..., None]) -> Callable[..., None]:
        """Return a ``Tensor.backward`` that computes the same gradients as one device for the whole batch."""
        stepper = self._stepper

        @functools.wraps(original)
        def backward(
            loss: Tensor,
            gradient: Tensor | None = None,
            retain_graph: bool | None = None,
            create_graph: bool = False,
            inputs: Any = None,
        ) -> None:
            is_replaced = not stepper.is_inside_backward and (gradient is None or _fits(loss, gradient))
            if not is_replaced or stepper.computes_alone():
                original(loss, gradient, retain_graph, create_graph, inputs)
                return
            stepper.meter.name_loss(sys._getframe(1), loss)
            total, problem = (loss, None) if gradient is None else (_total([loss], [gradient]), _GIVEN)
            compute = functools.partial(original, loss, gradient, retain_graph, create_graph, inputs)
            self._run(total, problem, compute, retain_graph, create_graph, inputs)

        return backward

    def wrap_function(self, original: Callable[..., None]) -> Callable[..., None]:
        """Return a ``torch.autograd.backward`` that computes the same gradients as one device for the whole batch."""
        stepper = self._stepper

        @functools.wraps(original)
        def backward(
            tensors: Any,
            grad_tensors: Any = None,
            retain_graph: bool | None = None,
            create_graph: bool = False,
            grad_variables: Any = None,
            inputs: Any = None,
        ) -> None:
            caller = sys._getframe(1)
            compute = functools.partial(
                original, tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs
            )
            is_of_cell = not caller.f_globals.get("__name__", "").startswith(_SKIPPED_CALLERS)
            if stepper.is_inside_backward or not is_of_cell or stepper.computes_alone():
                compute()
                return
            # Iterators are read once.
            losses: list[Any] = [tensors] if isinstance(tensors, Tensor | GradientEdge) else list(tensors)
            given = grad_tensors if grad_variables is None else grad_variables
            gradients = (
                [given] * len(losses) if given is None else [given] if isinstance(given, Tensor) else list(given)
            )
            compute = functools.partial(original, losses, gradients, retain_graph, create_graph, inputs=inputs)
            if stepper.bundle.models and any(isinstance(loss, GradientEdge) for loss in losses):
                raise MisuseError(_EDGE)
            if not losses or len(gradients) != len(losses) or not all(map(_fits, losses, gradients)):
                compute()
                return
            stepper.meter.name_loss(caller, losses[0])
            is_one_loss = len(losses) == 1 and gradients[0] is None
            total, problem = (losses[0], None) if is_one_loss else (_total(losses, gradients), _GIVEN)
            self._run(total, problem, compute, retain_graph, create_graph, inputs)

        return backward

    def _run(
        self,
        loss: Tensor,
        problem: str | None,
        compute: Callable[[], None],
        retain_graph: bool | None,
        create_graph: bool,
        inputs: Any,
    ) -> None:
        """Compute the gradients of a loss; by ``compute`` where there is nothing to average, or torch raises errors."""
        if self.needs_check or type(loss.grad_fn) not in self._loss_check.checked_kinds:
            self._check(loss, problem)
            with self._loss_check.paused():
                self._compute(loss, compute, retain_graph, create_graph, inputs)
        else:
            self._compute(loss, compute, retain_graph, create_graph, inputs)

    @torch.enable_grad()  # the loss is scaled first, and the cell may call backward under no_grad
    def _compute(
        self,
        loss: Tensor,
        compute: Callable[[], None],
        retain_graph: bool | None,
        create_graph: bool,
        inputs: Any,
    ) -> None:
        self.has_unused_gradients = True
        stepper = self._stepper
        if not stepper.bundle.models or loss.numel() != 1 or not loss.requires_grad:
            compute()
        elif inputs is not None:
            listed = _listed(inputs)
            if not listed:
                compute()  # raises torch's error
                return
            stepper.backward(loss, retain_graph=retain_graph, create_graph=create_graph, inputs=listed)
        elif retain_graph is None and not create_graph:
            stepper.backward(loss)
        else:
            stepper.backward(loss, retain_graph=retain_graph, create_graph=create_graph)

    def wrap_grad(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a ``torch.autograd.grad`` that in model division computes the same gradients as one device.

        Gradients of the parameters that a backward pass averages over ranks are averaged here too.
        """
        stepper, exchange = self._stepper, self._calls.exchange
        # One output of a divided call may have been computed from another: a gradient by that one includes this path.
        grad_of_related = self._calls.related.replace_grad(original)

        @functools.wraps(original)
        def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            listed = _listed(inputs)
            if stepper.window.is_divided or self._calls.is_inside or stepper.computes_alone():
                return original(outputs, listed, *args, **kwargs)
            gradients = grad_of_related(outputs, listed, *args, **kwargs)
            averaged = stepper.averaged_parameters
            return tuple(
                exchange.average(gradient) if gradient is not None and id(item) in averaged else gradient
                for item, gradient in zip(listed, gradients, strict=True)
            )

        return grad


_SKIPPED_CALLERS = ("torch._tensor", "accel_nb.")
"""Modules whose calls are not replaced: torch's methods, which are replaced themselves, and trials on one rank."""
_EDGE = (
    "torch.autograd.backward begins at a GradientEdge, which has no value by which the gradients of workers can be "
    "averaged: pass the tensor itself"
)
_GIVEN = "a backward pass has several losses, or starts with gradients of its own"


def _listed(inputs: Any) -> list[Any]:
    """Return the inputs of a backward pass as a list: they may be a tensor, a dict or an iterator."""
    if isinstance(inputs, Tensor | GradientEdge):
        return [inputs]
    return list(inputs.values() if isinstance(inputs, Mapping) else inputs)


def _fits(loss: Any, gradient: Tensor | None) -> bool:
    """Return whether a backward pass can start from a tensor with this gradient; for others torch raises errors."""
    if not isinstance(loss, Tensor) or not loss.requires_grad:
        return False
    return loss.numel() == 1 if gradient is None else gradient.shape == loss.shape


def _total(losses: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> Tensor:
    """Return a loss of one value with which a backward pass computes the same as from several tensors."""
    starts = [torch.ones_like(loss) if start is None else start for loss, start in zip(losses, gradients, strict=True)]
    with torch.enable_grad():
        return _Total.apply(len(losses), *losses, *starts)  # pyright: ignore[reportReturnType]


class _Total(Function):
    """The sum of tensors times their gradients; these are constants, which get no gradient themselves."""

    @staticmethod
    def forward(ctx: Any, number: int, *values: Tensor) -> Tensor:
        losses, gradients = values[:number], values[number:]
        ctx.save_for_backward(*gradients)
        terms = [loss * start.conj() for loss, start in zip(losses, gradients, strict=True)]
        return torch.stack([(term.real if term.is_complex() else term).sum() for term in terms]).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        starts = ctx.saved_tensors
        return None, *(gradients[0] * start for start in starts), *(None for _ in starts)
