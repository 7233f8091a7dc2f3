"""The base class of prepared loaders' iterators, which can be copied to another process once they have ended."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any


class EndingIterator(Iterator[Any]):
    """An iterator of a loader, which can be copied to another process only after it has ended.

    Its length is that of its loader, as with the iterators of ``DataLoader``.
    """

    __slots__ = ("_loader", "has_ended")

    def __init__(self, loader: Sized) -> None:
        self.has_ended = False
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def _accel_nb_reduce(self) -> Any:
        if not self.has_ended:
            raise TypeError("its position cannot be copied")
        return iter, ((),)
