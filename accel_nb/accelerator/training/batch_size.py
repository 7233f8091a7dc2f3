"""Search for a batch size that fits into memory on all ranks."""

from __future__ import annotations

import functools
import inspect
import logging
import traceback
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from accel_nb.accelerator.process.memory_release import free_cached_memory, is_out_of_memory
from accel_nb.errors import MisuseError
from accel_nb.runtime.distributed.communicator import TorchComm
from accel_nb.runtime.distributed.current_world import current_world
from accel_nb.runtime.distributed.process_group import DefaultGroup

logger = logging.getLogger(__name__)

_OOM = "out of memory"
_RELATIVE_PRECISION = 16


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[int], int] | None = None,
    *,
    keep_global_batch: bool = False,
    probe: Callable[[int], object] | None = None,
) -> Callable[..., Any]:
    """Decorate ``function(batch_size, ...)`` to be called again with half the batch as long as memory runs out.

    With several ranks every rank must call. If memory runs out on any rank, all ranks abandon the attempt and start the
    next one together. Each attempt has a new process group, so build models, optimizers and everything else that
    communicates between ranks inside of the function. Each failed attempt is logged as one line on rank 0, and
    its memory is freed.

    Args:
        function: The function to run; its first parameter is ``batch_size``, which callers leave out.
        starting_batch_size: The first and largest size.
        reduce_batch_size_fn: Returns the next size after one that failed; by default half of it.
        keep_global_batch: Pass ``gradient_accumulation_steps`` second, so that the product of the two stays the
            starting size; only its divisors are tried.
        probe: Called with a size to test whether it fits, for example by one training step. Before ``function`` is
            called, the largest size that fits is found by bisection, to within a sixteenth.

    Raises `MisuseError` if a batch of 1 does not fit, or the function has other parameters.
    """
    if type(starting_batch_size) is not int or starting_batch_size < 1:
        raise MisuseError(f"starting_batch_size is {starting_batch_size!r}; it must be a whole number of at least 1")
    if keep_global_batch and reduce_batch_size_fn is not None:
        raise MisuseError("keep_global_batch tries the divisors of the starting size; leave reduce_batch_size_fn out")
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
            keep_global_batch=keep_global_batch,
            probe=probe,
        )
    name = getattr(function, "__name__", type(function).__name__)
    signature = _checked_signature(function, name, keep_global_batch)
    search = _Search(name, starting_batch_size, reduce_batch_size_fn, keep_global_batch)

    @functools.wraps(function)
    def with_a_batch_that_fits(*args: Any, **kwargs: Any) -> Any:
        try:
            signature.bind(*search.arguments(starting_batch_size), *args, **kwargs)
        except TypeError as error:
            raise MisuseError(
                f"{name}{signature} was called with arguments that do not fit ({error}); the decorator passes "
                f"{' and '.join(search.names)}, so leave these out"
            ) from None
        first = starting_batch_size if probe is None else search.largest(probe)
        return search.run(first, lambda size: function(*search.arguments(size), *args, **kwargs))

    return with_a_batch_that_fits


def _checked_signature(function: Callable[..., Any], name: str, keep_global_batch: bool) -> inspect.Signature:
    signature = inspect.signature(function)
    wanted = ["batch_size", "gradient_accumulation_steps"][: 1 + keep_global_batch]
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    found = [parameter.name for parameter in signature.parameters.values() if parameter.kind in kinds]
    if found[: len(wanted)] != wanted:
        raise MisuseError(
            f"{name}{signature} must begin with the parameter{'s' if keep_global_batch else ''} {', '.join(wanted)}, "
            "which find_executable_batch_size passes to it"
        )
    return signature


class _Search:
    """Search over batch sizes; every rank tries the same ones."""

    def __init__(self, name: str, start: int, reduce: Callable[[int], int] | None, keep_global_batch: bool) -> None:
        self._name = name
        self._start = start
        self._reduce = reduce
        self._keeps_global_batch = keep_global_batch
        self.names = ["batch_size", "gradient_accumulation_steps"][: 1 + keep_global_batch]

    def arguments(self, size: int) -> list[int]:
        """Return the leading arguments for the function."""
        return [size, self._start // size] if self._keeps_global_batch else [size]

    def run(self, size: int, call: Callable[[int], Any]) -> Any:
        """Call with decreasing sizes until memory suffices on all ranks; return this rank's result."""
        while True:
            done, result, where = _attempt(lambda size=size: call(size))
            if done:
                return result
            smaller = self._smaller(size)
            if smaller < 1:
                raise MisuseError(
                    f"{self._name} ran {_OOM}{where} with a batch size of {size}, and there is none smaller to try: "
                    "make the model or its inputs smaller, compute in 16 bits, or free what else holds memory"
                )
            self._log_attempt(size, where, smaller)
            size = smaller

    def largest(self, probe: Callable[[int], object]) -> int:
        """Return the largest size for which ``probe`` fits on all ranks, to within a sixteenth."""
        sizes = self._divisors() if self._keeps_global_batch else range(1, self._start + 1)
        done, _, where = _attempt(lambda: probe(self._start))
        if done:
            return self._start
        low, high = 0, len(sizes) - 1  # the smallest is not probed: `run` raises if it does not fit
        while high - low > max(1, 0 if self._keeps_global_batch else sizes[high] // _RELATIVE_PRECISION):
            middle = (low + high) // 2
            self._log_attempt(sizes[high], where, sizes[middle])
            done, _, found = _attempt(lambda size=sizes[middle]: probe(size))
            low, high = (middle, high) if done else (low, middle)
            where = where if done else found
        return sizes[low]

    def _smaller(self, size: int) -> int:
        if self._keeps_global_batch:
            return max((each for each in self._divisors() if each <= size // 2), default=0)
        if self._reduce is None:
            return size // 2
        smaller = self._reduce(size)
        if type(smaller) is not int or smaller >= size:
            raise MisuseError(f"reduce_batch_size_fn({size}) returned {smaller!r}; it must return a smaller number")
        return smaller

    def _divisors(self) -> Sequence[int]:
        return [size for size in range(1, self._start + 1) if self._start % size == 0]

    def _log_attempt(self, size: int, where: str, smaller: int) -> None:
        if current_world().is_main:
            accumulation = f" with {self._start // smaller} batches for one step" if self._keeps_global_batch else ""
            logger.warning(
                "%s: batch size %d ran %s%s, trying %d%s",
                self._name,
                size,
                _OOM,
                where,
                smaller,
                accumulation,
            )


def _attempt(call: Callable[[], Any]) -> tuple[bool, Any, str]:
    """Call a function on all ranks; return whether memory sufficed, the result, and where memory ran out, as text."""
    world = current_world()
    is_shared = world.size > 1 and DefaultGroup.is_open()
    ran_out = False
    try:
        result = call()
        if is_shared:
            TorchComm(world, DefaultGroup.adopt(world)).barrier()  # fails if a rank has run out of memory
        return True, result, ""
    except Exception as error:
        ran_out = is_out_of_memory(error)
        if not ran_out and not (is_shared and isinstance(error, RuntimeError) and DefaultGroup.has_flag(_OOM)):
            raise
        if is_shared and ran_out:
            DefaultGroup.set_flag(_OOM)
        # Frees the objects that the frames of the failed attempt reference.
        traceback.clear_frames(cast(Any, error.__traceback__))
    free_cached_memory()
    if not is_shared:
        return False, None, ""
    group = DefaultGroup.adopt(world)
    group.replace_default_group()
    flags = TorchComm(world, group).all_gather(torch.tensor(ran_out, dtype=torch.uint8, device="cpu"))
    ranks = [str(rank) for rank, flag in enumerate(flags) if flag]
    return False, None, f" on rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}"
