"""Seeds that the user's code requests from the operating system, the same ones on every rank of a plain cell.

A generator that is made without a seed, such as in a simulated environment, would draw other numbers on each rank, and
the ranks would compute different batches. While a plain cell runs, the functions of Python, NumPy and torch that seed a
generator from the operating system derive the seed from a number that all ranks share, and that differs in each cell.
Other uses of the operating system's random numbers, such as keys and identifiers, are not changed.
"""

from __future__ import annotations

import functools
import random
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy.random.bit_generator
import torch

from accel_nb.installed_files import is_of_stdlib
from accel_nb.runtime import rng
from accel_nb.runtime.process.user_code import is_user_module

_SEED_BITS = 63


class SharedSeeds:
    """The seeds of one cell, by the line of the user's code that requests them."""

    def __init__(self) -> None:
        self._entropy: int | None = None
        self._num_drawn: Counter[str] = Counter()

    def begin(self, entropy: int | None) -> None:
        """Begin a cell; ``entropy`` is equal on all ranks; with None each rank uses seeds from its operating system."""
        self._entropy = entropy
        self._num_drawn.clear()

    def replacements(self) -> Iterator[tuple[Any, str, Callable[[Callable[..., Any]], Callable[..., Any]]]]:
        """Yield the functions to replace: their owner, their name, and a function that returns the replacement."""
        yield random.Random, "seed", self._make_python_seed
        yield random, "seed", self._make_python_seed
        yield numpy.random.bit_generator, "randbits", self._make_random_bits
        for owner in (torch, torch.random):
            yield owner, "seed", self._make_torch_seed

    def _draw(self, num_bits: int) -> int | None:
        """Return a number that is equal on all ranks; None if the user's code does not request it."""
        if self._entropy is None or (line := _requesting_line()) is None:
            return None
        self._num_drawn[line] += 1
        parts = range(-(-num_bits // _SEED_BITS))
        words = [rng.derive_seed(self._entropy, line, self._num_drawn[line], part) for part in parts]
        return sum(word << (_SEED_BITS * part) for part, word in zip(parts, words, strict=True)) & ((1 << num_bits) - 1)

    def _make_python_seed(self, original: Callable[..., None]) -> Callable[..., None]:
        """Return a ``seed`` for `random.Random`, as a method or bound to the global generator."""

        @functools.wraps(original)
        def seed(*args: Any, **kwargs: Any) -> None:
            own = args[:1] if args and isinstance(args[0], random.Random) else ()
            given = [*args[len(own) :], *kwargs.values()]
            drawn = self._draw(2 * _SEED_BITS) if not given or given[0] is None else None
            if drawn is None:
                original(*args, **kwargs)
            else:
                original(*own, drawn)

        return seed

    def _make_random_bits(self, original: Callable[[int], int]) -> Callable[[int], int]:
        """Return a ``secrets.randbits`` for NumPy, which takes the seeds of its generators from it."""

        @functools.wraps(original)
        def randbits(k: int) -> int:
            drawn = self._draw(k)
            return original(k) if drawn is None else drawn

        return randbits

    def _make_torch_seed(self, original: Callable[[], int]) -> Callable[[], int]:
        @functools.wraps(original)
        def seed() -> int:
            drawn = self._draw(_SEED_BITS)
            if drawn is None:
                return original()
            torch.manual_seed(drawn)
            return drawn

        return seed


def _requesting_line() -> str | None:
    """Return the nearest line of the user's code among the callers.

    None if a module of the standard library, other than ``random``, or of accel_nb is nearer, as for the name of a
    temporary file: such calls may differ among ranks.
    """
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if is_user_module(module):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        is_own = module == __name__ or module == "random"
        if not is_own and (module.partition(".")[0] == "accel_nb" or is_of_stdlib(frame.f_code.co_filename)):
            return None
        frame = frame.f_back
    return None
