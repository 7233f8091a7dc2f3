"""Values of tensors that a model's code reads as Python numbers, such as the condition of a branch.

Each rank reads them from its own rows. So a branch that is the same for all rows when the layout is checked may later
differ between ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

_READERS = ("__bool__", "__float__", "__index__", "__int__", "item", "tolist")


@contextmanager
def observed_reads(observe: Callable[[Any], object]) -> Iterator[None]:
    """Call ``observe`` with each value that is read in the block, except for values that ``observe`` itself reads."""
    is_inside = False

    def wrap(plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def read(tensor: Tensor) -> Any:
            nonlocal is_inside
            value = plain(tensor)
            if not is_inside:
                is_inside = True
                try:
                    observe(value)
                finally:
                    is_inside = False
            return value

        return read

    own = {name: vars(Tensor)[name] for name in _READERS if name in vars(Tensor)}
    for name in _READERS:
        setattr(Tensor, name, wrap(getattr(Tensor, name)))
    try:
        yield
    finally:
        for name in _READERS:
            if name in own:
                setattr(Tensor, name, own[name])
            else:  # inherited from Tensor's C base
                delattr(Tensor, name)


def values_to_compare(*runs: list[Any]) -> tuple[bool, ...]:
    """Return for each read whether its value was the same in all runs, so that ranks must compare it.

    Where values differed although the results were equal, the value does not affect the result.
    """
    return tuple(all(value == values[0] for value in values) for values in zip(*runs, strict=False))
