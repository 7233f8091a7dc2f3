"""The record that a rank sends when its device has run out of memory. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MemoryHolder:
    """A description of an object, and the memory that it uses."""

    description: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class OutOfMemoryReport:
    """Use of a device's memory when an allocation failed; all sizes in bytes."""

    device: str
    requested: int | None
    """The size of the failed allocation; None if the error does not contain it."""
    free: int
    bytes_by_kind: dict[str, int]
    """By kind: parameters, gradients, optimizer, activations, other tensors."""
    unattributed: int
    """Allocated memory that belongs to no tensor."""
    cached: int
    """Memory that the allocator has reserved and no object uses."""
    usable: int
    """The most memory that the rank can use."""
    line: str
    """The line of the cell that failed."""
    module: str
    """The module whose forward pass failed; empty if the failure was elsewhere."""
    holders: tuple[MemoryHolder, ...]
    """Objects that use the most memory, the largest first."""
