"""Anonymous memory that keeps its size: one that shrinks under a mapping ends the process that reads there."""

from __future__ import annotations

import fcntl


def seal_size(descriptor: int) -> None:
    """Let nobody change the size of a memory file, which was made with ``MFD_ALLOW_SEALING``, any more."""
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)


def is_sealed(descriptor: int) -> bool:
    """Whether the file cannot shrink; False for what is no memory file."""
    try:
        return bool(fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:
        return False
