"""The record that a rank sends when it has run out of memory. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MemoryHolder:
    """An object that holds memory, described in words."""

    description: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class OutOfMemoryReport:
    """What held the memory of a device when an allocation failed; all sizes in bytes."""

    device: str
    requested: int | None
    """What was requested; None if the error does not say."""
    free: int
    held: dict[str, int]
    """By kind: parameters, gradients, optimizer, activations, other tensors."""
    rest: int
    """What was allocated and is in no tensor."""
    cached: int
    """What the allocator keeps for later."""
    room: int
    """What the rank could use at most."""
    line: str
    """The line of the cell that failed."""
    module: str
    """The module whose forward failed; empty outside of a forward."""
    holders: tuple[MemoryHolder, ...]
    """The largest ones first."""
