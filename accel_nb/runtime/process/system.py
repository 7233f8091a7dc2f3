"""A check of the operating system for the features that workers need."""

from __future__ import annotations

import os
import platform


def why_no_workers() -> str | None:
    """Return why workers cannot run on this operating system, and what to do; None if they can."""
    if hasattr(os, "fork") and hasattr(os, "memfd_create"):
        return None
    name = platform.system()
    remedy = "run Jupyter in WSL" if name == "Windows" else "run Jupyter on Linux, as in a container or virtual machine"
    return f"accel_nb runs its workers on Linux, with forked processes and memory files, which {name} lacks: {remedy}"
