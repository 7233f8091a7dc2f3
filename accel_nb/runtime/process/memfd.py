"""Memory files of fixed size: if a mapped file shrank, a process that reads the mapping would get SIGBUS."""

from __future__ import annotations

import fcntl


def seal_size(descriptor: int) -> None:
    """Seal the size of a memory file, which must have been created with ``MFD_ALLOW_SEALING``."""
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)


def is_sealed(descriptor: int) -> bool:
    """Return whether a memory file cannot shrink; False for other files."""
    try:
        return bool(fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:
        return False
