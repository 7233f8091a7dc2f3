"""The choices that make up one random program. Each is a function of the program's number and the axis alone."""

from __future__ import annotations

import random
from collections.abc import Mapping


class Choices:
    """Random choices, reproducible by number, or the simplest ones. A forced choice leaves all others as they are."""

    def __init__(self, number: int, forced: Mapping[str, str] | None = None, *, is_simple: bool = False) -> None:
        self.number = number
        self._forced = forced or {}
        self._is_simple = is_simple
        self.made: dict[str, str] = {}
        """The chosen option of each axis."""
        self.options: dict[str, tuple[str, ...]] = {}
        """The options of each axis; the first is the simplest."""
        self._variety = random.Random(str(number)).choice((0.25, 0.5, 1.0))

    def pick(self, axis: str, *options: str, simple: float | None = None) -> str:
        """Return one of the options, the first of which is the simplest.

        ``simple`` is the probability of the first option, in the most varied of the programs; without it all have the
        same. A forced option that this program cannot have is replaced by the simplest one.
        """
        first, *others = options
        if axis in self._forced:
            chosen = self._forced[axis] if self._forced[axis] in options else first
        elif self._is_simple:
            chosen = first
        else:
            generator = random.Random(f"{self.number}/{axis}")
            is_simple = simple is not None and generator.random() < 1 - (1 - simple) * self._variety
            pool = others if simple is not None and others else options
            chosen = first if is_simple else generator.choice(pool)
        self.made[axis], self.options[axis] = chosen, options
        return chosen

    def flip(self, axis: str, *, probability: float) -> bool:
        """Return whether an option that a program has or lacks is chosen."""
        return self.pick(axis, "no", "yes", simple=1 - probability) == "yes"
