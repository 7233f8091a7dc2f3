"""Tools for trials of a division: copies of a module, threads in place of ranks, and comparison of results.

A trial communicates with no other rank.
"""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from accel_nb.strategies.block_calls import HOOKS

T = TypeVar("T")
_TIMEOUT_S = 60.0
_SEED = 1


class TrialFailed(Exception):
    """Raised if parts compute other results than the whole, or if a trial cannot be made."""


class ThreadCommunicator:
    """The communicator of one of several threads; it exchanges tensors as a communicator of ranks does."""

    def __init__(self, barrier: threading.Barrier, values: list[Any], index: int) -> None:
        self._barrier = barrier
        self._values = values
        self._index = index

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Replace a tensor by the sum over threads."""
        return tensor.copy_(torch.stack(self.all_gather(tensor)).sum(0))

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return every thread's tensor."""
        return self._exchange(tensor.detach().clone())

    def all_to_all(self, parts: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """Send one part to each thread, and return the parts received from each."""
        found = [sent[self._index] for sent in self._exchange([part.detach().clone() for part in parts])]
        return [part.view(list(shape)) for part, shape in zip(found, shapes, strict=True)]

    def _exchange(self, value: Any) -> list[Any]:
        self._values[self._index] = value
        self._barrier.wait(_TIMEOUT_S)
        found = list(self._values)
        self._barrier.wait(_TIMEOUT_S)
        return found


def copy_without_hooks(
    module: nn.Module,
    of_parameter: Callable[[Tensor], Tensor] = lambda value: value.to("cpu", copy=True),
    of_buffer: Callable[[Tensor], Tensor] = lambda value: value.to("cpu", copy=True),
) -> nn.Module:
    """Return a copy of a module without the hooks on its calls, which are code of the user.

    Two functions return the tensors of the copy's parameters and buffers, in other memory.
    """
    made: dict[int, Any] = {id(getattr(part, name)): OrderedDict() for part in module.modules() for name in HOOKS}
    for value in module.parameters():
        copied = of_parameter(value.detach())
        made[id(value)] = nn.Parameter(copied, value.is_floating_point() or value.is_complex())
    made |= {id(value): of_buffer(value.detach()) for value in module.buffers()}
    return copy.deepcopy(module, made)


def random_copy(
    module: nn.Module, dtype: torch.dtype, select: Callable[[Tensor], Tensor] = lambda value: value
) -> nn.Module:
    """Return a copy on the CPU with random weights, as weights of zero would hide errors; all require a gradient.

    ``select`` returns the part of a parameter that the copy has. Floats get ``dtype``.
    """
    generator = torch.Generator().manual_seed(_SEED)

    def convert(value: Tensor) -> Tensor:
        if value.is_complex():
            return value.to("cpu", dtype.to_complex(), copy=True)
        return value.to("cpu", dtype if value.is_floating_point() else None, copy=True)

    def vary(value: Tensor) -> Tensor:
        value = convert(select(value))
        if value.is_floating_point() or value.is_complex():
            noise = torch.randn(value.shape, generator=generator, dtype=value.dtype, device="cpu")
            value.add_(noise, alpha=max(value.shape[-1], 1) ** -0.5 if value.dim() > 1 else 0.3)
        return value

    return copy_without_hooks(module, vary, convert)


def run_threads(size: int, compute: Callable[[int, ThreadCommunicator], T]) -> list[T]:
    """Call ``compute(index, comm)`` in ``size`` threads, and return the results by index.

    Raises the error that was first in time; `RuntimeError` if the threads do not make the same exchanges, or if one
    computes longer than the others wait.
    """
    barrier = threading.Barrier(size)
    values: list[Any] = [None] * size
    results: dict[int, T] = {}
    errors: list[Exception] = []

    def run(index: int) -> None:
        try:
            results[index] = compute(index, ThreadCommunicator(barrier, values, index))
        except threading.BrokenBarrierError:
            pass
        except Exception as error:
            errors.append(error)
        finally:
            if index not in results:
                barrier.abort()

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(size)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except BaseException:  # an interrupt: the threads end before the model is used again
        barrier.abort()
        for thread in threads:
            if thread.is_alive():
                thread.join()
        raise
    if errors:
        raise errors[0]
    if not results:
        raise RuntimeError(f"a thread has computed for more than {_TIMEOUT_S:g} s, and others have waited for it")
    if len(results) < size:
        raise RuntimeError("the threads made different exchanges")
    return [results[index] for index in range(size)]


def is_close(actual: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Return whether two results have one shape and differ by at most ``tolerance``, relative to values above 1."""
    if actual.shape != expected.shape:
        return False
    if not expected.numel():
        return True
    if not (expected.is_floating_point() or expected.is_complex()):
        return torch.equal(actual, expected)
    scale = max(float(expected.abs().max()), 1.0)
    return bool((actual - expected).abs().max() <= tolerance * scale)
