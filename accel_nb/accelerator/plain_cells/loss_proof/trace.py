"""Trace of the operations from the samples of one batch to the losses that are computed from it.

If a batch is divided among the workers, each worker computes the loss of its share. The combined losses equal the loss
of the whole batch if it is a sum or a mean over samples. A `LossTrace` records the operations of one step, to prove
that. A loss that depends on operations without a rule is not proven.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.weak import WeakIdKeyDictionary

from accel_nb.accelerator.plain_cells.detection.module_calls import Forward
from accel_nb.accelerator.plain_cells.loss_proof.contrastive_check import num_compared_rows
from accel_nb.accelerator.plain_cells.loss_proof.sample_rules import (
    BatchReduction,
    MixedSamples,
    OperationCall,
    SampleDependence,
    SampleRows,
    base_name,
    bind_arguments,
    find_sample_rows,
    propagate,
)
from accel_nb.accelerator.training.loss_classification import LossReduction, WeightedLoss
from accel_nb.runtime.distributed.sharded import local_shard
from accel_nb.runtime.process.user_code import user_frame
from accel_nb.runtime.tensors.nested import find_tensors
from accel_nb.runtime.tensors.versions import version_of

_COMMON_NUMBERS = frozenset({0.0, 1.0})


class LossTrace(TorchDispatchMode):
    """Traces a batch of ``num_samples`` samples through a step, from `start` to `stop`.

    A prepared model is treated as a function of single samples, and the operations inside of it are not traced.
    """

    def __init__(self, batch: Any, num_samples: int) -> None:
        super().__init__()
        self._num_samples = num_samples
        self._dependences: Any = WeakIdKeyDictionary()
        self._batch_numbers: set[float] = set()
        # Addresses of storages that were partly overwritten through a view.
        self._overwritten: set[int] = set()
        # Whether a prepared model's forward pass has changed buffers, other than those of batch normalization.
        self.has_changed_buffers = False
        self._is_active = False
        self._plain_grad = torch.autograd.grad
        for tensor in find_tensors(batch):
            self._dependences[tensor] = self._in_batch(tensor)

    def start(self) -> None:
        """Begin to trace."""
        if not self._is_active:
            self._is_active = True
            torch.autograd.grad = self._grad  # type: ignore[assignment]
            if self not in _get_current_dispatch_mode_stack():
                self.__enter__()

    def stop(self) -> None:
        """Stop tracing."""
        if not self._is_active:
            return
        self._is_active = False
        torch.autograd.grad = self._plain_grad
        # If the user's code has entered another mode since, this one stays below it on the stack and records nothing.
        if _get_current_dispatch_mode_stack()[-1:] == [self]:
            self.__exit__(None, None, None)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Suspend tracing inside of the block."""
        was_active = self._is_active
        self.stop()
        try:
            yield
        finally:
            if was_active:
                self.start()

    def call_model(self, forward: Forward, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a prepared model without tracing its operations."""
        inputs = [self._dependence_of(tensor) for tensor in find_tensors([*args, *kwargs.values()])]
        before = _buffer_versions(model)
        with self.paused():
            output = forward(model, *args, **kwargs)
        self.has_changed_buffers |= _buffer_versions(model) != before
        mixed = next((item for item in inputs if isinstance(item, MixedSamples)), None)
        if mixed is None and any(isinstance(item, BatchReduction) for item in inputs):
            mixed = _mixed("a model that computes with a value of the whole batch")
        for tensor in find_tensors(output):
            self._dependences[tensor] = mixed or self._of_model(tensor)
        return output

    def explain_unproven(self, loss: Tensor, reduction: LossReduction) -> str | None:
        """Return the reason if a loss is not proven to be reduced as ``reduction`` states; None if it is proven."""
        found = self._dependence_of(loss)
        if isinstance(found, MixedSamples):
            return found.reason if found.line is None else f"{found.reason} in line {found.line}"
        if not isinstance(found, BatchReduction):
            return "it was computed in a way that cannot be traced"
        if found.kind == "model":
            if rows := num_compared_rows(loss, self._num_samples):
                return f"the model compares the samples of the batch with each other, {rows} x {rows}"
            return None if _is_reduced_by_torch(loss) else "the model computes it in a way that cannot be traced"
        is_weighted = isinstance(reduction, WeightedLoss)
        if found.kind == reduction or (is_weighted and found.kind == "weighted"):
            return None
        if is_weighted and found.kind == "mean" and reduction.divisor is None:
            return None
        return f"it is a {found.kind} over samples in parts"

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Run an operation, and record the dependence of its results on the samples."""
        kwargs = kwargs or {}
        if not self._is_active:
            return func(*args, **kwargs)
        dependences = {
            id(tensor): found
            for tensor in _tensors_of(args, kwargs)
            if (found := self._dependence_of(tensor)) is not None
        }
        output = func(*args, **kwargs)
        if not dependences:
            return output
        if not isinstance(output, Tensor | tuple | list):
            if isinstance(output, bool | int | float) and not isinstance(next(iter(dependences.values())), SampleRows):
                self._record_number(output)
            return output
        name = base_name(func)
        call = OperationCall(
            name, bind_arguments(func, args, kwargs), dependences, self._num_samples, frozenset(self._batch_numbers)
        )
        for tensor in [output] if isinstance(output, Tensor) else [item for item in output if isinstance(item, Tensor)]:
            self._record(tensor, propagate(call, tensor), is_in_place=any(tensor is item for item in args))
        return output

    def _record(self, tensor: Tensor, found: SampleDependence | None, *, is_in_place: bool) -> None:
        if isinstance(found, MixedSamples) and found.line is None:
            found = _mixed(found.reason)
        if isinstance(found, SampleRows) and not found.is_counted:
            self._record_number(tensor.shape[found.dim])
            self._record_number(tensor.numel())
        before = self._dependences.get(tensor)
        if is_in_place and before != found and tensor._base is not None:
            self._overwritten.add(_address(tensor))
        if found is None:
            self._dependences.pop(tensor, None)
        else:
            self._dependences[tensor] = found

    def _dependence_of(self, tensor: Tensor) -> SampleDependence | None:
        found = self._dependences.get(tensor)
        if self._overwritten and not isinstance(found, MixedSamples) and _address(tensor) in self._overwritten:
            return MixedSamples("values that were written into a part of a tensor")
        return found

    def _in_batch(self, tensor: Tensor) -> SampleDependence | None:
        found = find_sample_rows(tensor, self._num_samples)
        if found is None:
            return SampleRows(0, 0, 0) if tensor.dim() else MixedSamples("a number of the batch as the loader gives it")
        return found

    def _of_model(self, tensor: Tensor) -> SampleDependence:
        if not tensor.dim():
            return BatchReduction("model")
        found = find_sample_rows(tensor, self._num_samples)
        return found or _mixed("an output of the model that has no dimension for samples")

    def _grad(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Call ``torch.autograd.grad``: gradients with respect to a tensor have the dependence of the tensor."""
        with self.paused():
            gradients = self._plain_grad(outputs, inputs, *args, **kwargs)
        sources = [outputs] if isinstance(outputs, Tensor) else list(outputs)
        known = [self._dependence_of(tensor) for tensor in sources]
        is_per_sample = all(isinstance(item, SampleRows) or item == BatchReduction("sum") for item in known)
        for tensor, gradient in zip([inputs] if isinstance(inputs, Tensor) else inputs, gradients, strict=False):
            own = self._dependence_of(tensor)
            if isinstance(gradient, Tensor):
                is_known = is_per_sample and isinstance(own, SampleRows)
                self._dependences[gradient] = own if is_known else _mixed("a gradient")
        return gradients

    def _record_number(self, number: float) -> None:
        if float(number) not in _COMMON_NUMBERS:
            self._batch_numbers.add(float(number))


def _mixed(reason: str) -> MixedSamples:
    """Return a `MixedSamples` with the line of the user's code that is running."""
    frame = user_frame()
    return MixedSamples(reason, None if frame is None else frame.f_lineno)


def _buffer_versions(model: nn.Module) -> list[tuple[int, int]]:
    """Return ids and versions of a model's buffers, except in batch normalization, which has a separate note."""
    parts = [part for part in model.modules() if not isinstance(part, _BatchNorm)]
    return [(id(value), version_of(value)) for part in parts for value in part.buffers(recurse=False)]


def _address(tensor: Tensor) -> int:
    """Return the address of a tensor's storage, or of this rank's shard of it; 0 without storage."""
    own = local_shard(tensor)
    return own.untyped_storage().data_ptr() if own.layout is torch.strided else 0


def _tensors_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from (item for item in value if isinstance(item, Tensor))


def _is_reduced_by_torch(loss: Tensor) -> bool:
    """Return whether a loss that a model has computed is a sum, a mean or a loss of torch, possibly times a number.

    A divided call has combined the losses of the ranks' rows, and its check has shown that this is right.
    """
    node: Any = loss.grad_fn
    while type(node).__name__ in ("MulBackward0", "DivBackward0", "RowReductionBackward"):
        inner = [child for child, _ in node.next_functions if child is not None]
        if len(inner) != 1:
            return False
        node = inner[0]
    name = type(node).__name__
    is_loss = hasattr(node, "_saved_reduction") and hasattr(node, "_saved_target")
    return is_loss or name in ("MeanBackward0", "MeanBackward1", "SumBackward0")
