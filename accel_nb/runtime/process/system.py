"""A check of the operating system for the features that workers need."""

from __future__ import annotations

import os
import platform
import sys


def why_no_workers() -> str | None:
    """Return the reason if workers cannot run on this operating system, and what to do; None if they can."""
    if hasattr(os, "fork") and hasattr(os, "memfd_create"):
        return None
    name = platform.system()
    if name == "Linux":
        return (
            f"accel_nb needs os.memfd_create, and {sys.executable} was built without it, for a C library before glibc "
            "2.27: run Jupyter with another build of Python, such as that of the distribution"
        )
    remedy = "run Jupyter in WSL" if name == "Windows" else "run Jupyter on Linux, as in a container or virtual machine"
    return f"accel_nb runs its workers on Linux, with forked processes and memory files, which {name} lacks: {remedy}"
