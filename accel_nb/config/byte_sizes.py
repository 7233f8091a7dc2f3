"""Sizes in bytes as text, read and written."""

from __future__ import annotations

from pydantic import ByteSize, TypeAdapter

from accel_nb.config.message_text import quoted
from accel_nb.errors import ConfigError


def bytes_of(size: object) -> int:
    """Return the bytes of a size such as ``80GiB`` (2^30), ``80GB`` (10^9) or 512; raise ValueError if invalid."""
    if isinstance(size, bool) or not isinstance(size, int | str):
        raise ValueError("not a size")
    num_bytes = int(TypeAdapter(ByteSize).validate_python(size))
    if not 0 <= num_bytes < 2**63:
        raise ValueError("not a size")
    return num_bytes


def read_bytes(size: int | str, what: str, *, least: int = 0) -> int:
    """Return the bytes of a size as `bytes_of` does; raise `ConfigError`, which names ``what``, if it is invalid."""
    try:
        num_bytes = bytes_of(size)
    except (ValueError, OverflowError):
        num_bytes = -1
    if num_bytes < least:
        allowed = f'bytes as a whole number from {least}, or text such as "10GB" or "1.5GiB"'
        raise ConfigError(f"{what} is {quoted(size)}; write {allowed}")
    return num_bytes


def size_text(num_bytes: float) -> str:
    """Return a size as text with three digits, in units of 2^10."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(num_bytes) >= (1024 if units[0] == "B" else 1000) and len(units) > 1:
        num_bytes /= 1024
        del units[0]
    digits = 0 if units[0] == "B" or abs(num_bytes) >= 100 else 1 if abs(num_bytes) >= 10 else 2
    return f"{num_bytes:.{digits}f} {units[0]}"
