"""A kind of objects that random sessions make and change."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """How objects of a kind are made, changed, and what of them others are made from."""

    make: tuple[str, ...]
    change: tuple[str, ...] = ()
