"""Gradients with respect to outputs of a divided call from which other outputs were computed, as scores from features.

A call returns the gathered rows of all ranks. The scores depend on this rank's rows of the features, not on the
gathered features: their gradient is the gathered gradient of the rows.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from accel_nb.runtime.distributed.row_exchange import RowExchange


@dataclass(frozen=True)
class _Rows:
    tensor: Tensor
    dim: int
    sizes: tuple[int, ...]
    version: int
    """The version of the gathered tensor; with another one it was changed in place and no longer has these rows."""


class RelatedOutputs:
    """Differentiates with respect to an output of a divided call, also through the other outputs of the call."""

    def __init__(self, exchange: RowExchange) -> None:
        self._exchange = exchange
        self._rows = WeakTensorKeyDictionary()

    def record(self, gathered: Sequence[tuple[Tensor, Tensor, int, Sequence[int]]]) -> None:
        """Record the gathered outputs of one call, with their rows; a single one is not related to another."""
        if len(gathered) > 1:
            for whole, rows, dim, sizes in gathered:
                if rows.requires_grad:
                    self._rows[whole] = _Rows(rows, dim, tuple(sizes), whole._version)

    def replace_grad(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a ``torch.autograd.grad`` of a list of inputs, some of which may be such outputs."""

        @functools.wraps(original)
        def grad(outputs: Any, inputs: list[Any], *args: Any, **kwargs: Any) -> Any:
            known = [None if kwargs.get("is_grads_batched") else self._rows_of(item) for item in inputs]
            places = [item if rows is None else rows.tensor for item, rows in zip(inputs, known, strict=True)]
            return tuple(
                gradient if rows is None or gradient is None else self._gather(rows, gradient)
                for rows, gradient in zip(known, original(outputs, places, *args, **kwargs), strict=True)
            )

        return grad

    def replace_retain_grad(self, original: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
        """Return a ``Tensor.retain_grad``."""

        @functools.wraps(original)
        def retain_grad(tensor: Tensor) -> None:
            rows = None if tensor.retains_grad else self._rows_of(tensor)
            original(tensor)
            if rows is None:
                return
            reference = weakref.ref(tensor)
            # The retained gradient before a pass through the output itself, which torch adds to it.
            before: list[Tensor | None] = []

            def record(_: Tensor) -> None:
                output = reference()
                before[:] = [None if output is None else output.grad]

            def keep(gradient: Tensor) -> None:
                whole = self._gather(rows, gradient.detach())
                if (output := reference()) is not None:
                    earlier = before.pop() if before else output.grad
                    output.grad = whole if earlier is None else earlier + whole

            _register_hook(tensor, record)
            _register_hook(rows.tensor, keep)

        return retain_grad

    def register_hook(self, original: Callable[..., Any], tensor: Tensor, hook: Callable[[Tensor], Any]) -> Any:
        """Register a hook on a tensor, which may be such an output; return its handle."""
        rows = self._rows_of(tensor)
        if rows is None:
            return original(tensor, hook)

        @functools.wraps(hook)
        def call(gradient: Tensor) -> Tensor | None:
            changed = hook(self._gather(rows, gradient))
            if changed is None:
                return None
            return self._exchange.take(changed, rows.dim, rows.sizes) * self._exchange.num_ranks

        return original(rows.tensor, call)

    def _rows_of(self, tensor: Any) -> _Rows | None:
        rows = self._rows.get(tensor) if isinstance(tensor, Tensor) else None
        return rows if rows is not None and rows.version == tensor._version else None

    def _gather(self, rows: _Rows, gradient: Tensor) -> Tensor:
        """Return the gradient of the output, given the gradient of its rows, which has a factor (see `RowExchange`)."""
        return self._exchange.gather(gradient, rows.dim, rows.sizes) / self._exchange.num_ranks


_register_hook = Tensor.register_hook  # the original method, for use inside of its replacement
