"""A check that a model's blocks form a chain: each takes the output of the one before, and nothing else uses it."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from accel_nb.errors import MisuseError
from accel_nb.runtime import rng
from accel_nb.runtime.tensors.nested import find_leaves, find_tensors
from accel_nb.strategies.block_calls import chain_input, with_chain_input

_REMEDY = "train with --pp 1, or divide layers with --tp"


class ChainProbe:
    """Replaces the blocks of one forward pass by random numbers, and checks how they are called."""

    def __init__(self, kind: str, num_blocks: int, attempt: int) -> None:
        self._kind, self._num_blocks, self._attempt = kind, num_blocks, attempt
        self._next = 0
        self._last: Tensor | None = None
        # The tensors that blocks get in addition to the previous block's output.
        self.others: list[Tensor] = []

    def call(self, number: int, compute: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        """Return random numbers in place of a block's output.

        Raise `MisuseError` unless it takes the previous block's output.
        """
        if number != self._next:
            raise MisuseError(f"the forward of {self._kind} calls its blocks in another order than listed: {_REMEDY}")
        self._next += 1
        hidden = chain_input(args, kwargs)
        if hidden is None or not hidden.is_floating_point():
            raise MisuseError(f"a block of {self._kind} does not take a tensor of floats as its first input: {_REMEDY}")
        last = self._last
        if last is not None and not (
            hidden.data_ptr() == last.data_ptr()
            and hidden.shape == last.shape
            and hidden.stride() == last.stride()
            and not hidden._version
        ):
            raise MisuseError(
                f"the forward of {self._kind} changes values between its blocks, which stages do not support: {_REMEDY}"
            )
        rest, named = with_chain_input(args, kwargs, hidden.new_empty(0))
        self.others += [value.clone() for value in find_tensors([list(rest), dict(named)])]
        # Only the last block returns the same in both attempts.
        seed = number if number == self._num_blocks - 1 else number + 1000 * self._attempt
        numbers = torch.randn(
            hidden.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64, device="cpu"
        )
        self._last = numbers.to(hidden.device, hidden.dtype)
        return self._last

    def finish(self) -> None:
        """Raise `MisuseError` if not all blocks were called."""
        if self._next != self._num_blocks:
            raise MisuseError(
                f"the forward of {self._kind} calls {self._next} of its {self._num_blocks} blocks: {_REMEDY}"
            )


def check_chain(kind: str, num_blocks: int, device: torch.device, run: Callable[[ChainProbe], Any]) -> Any:
    """Check how a model calls its blocks, and return an output that ``run`` has computed with random numbers.

    Raises `MisuseError` on every rank, as it exchanges nothing, if the blocks are no chain, or if anything but the
    next block depends on one.
    """
    results: list[tuple[list[Tensor], Any]] = []
    states = rng.capture(device)
    for attempt in range(2):
        probe = ChainProbe(kind, num_blocks, attempt)
        try:
            with torch.no_grad(), contextlib.redirect_stdout(io.StringIO()):
                output = run(probe)
        finally:
            rng.restore(states, device)
        probe.finish()
        results.append((probe.others, output))
    (first_others, first), (second_others, second) = results
    if not _are_equal(first_others, second_others) or not _are_equal(
        list(find_tensors(first)), list(find_tensors(second))
    ):
        raise MisuseError(
            f"in the forward of {kind}, more than the next block uses the output of a block, which only one stage has: "
            f"{_REMEDY}"
        )
    for leaf in find_leaves(first):
        if not (leaf is None or isinstance(leaf, Tensor)):  # a number may be read from the output of a block
            raise MisuseError(f"{kind} returns a {type(leaf).__name__}, which stages do not exchange: {_REMEDY}")
    return first


def _are_equal(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    return len(first) == len(second) and all(
        one.shape == other.shape and one.dtype == other.dtype and _have_equal_values(one, other)
        for one, other in zip(first, second, strict=True)
    )


def _have_equal_values(one: Tensor, other: Tensor) -> bool:
    # Of the random numbers in place of outputs a logarithm or a root is NaN.
    return torch.equal(one, other) or (
        one.is_floating_point() and torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)
    )
