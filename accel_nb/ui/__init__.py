"""The live panel, its picture, and the kernel's side of the sidebar. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel_nb.ui.comm import SidebarComm
    from accel_nb.ui.panel import Panel

__all__ = ["Panel", "SidebarComm"]


def __getattr__(name: str) -> Any:
    """Import a class on first use."""
    if name == "Panel":
        from accel_nb.ui.panel import Panel

        return Panel
    if name == "SidebarComm":
        from accel_nb.ui.comm import SidebarComm

        return SidebarComm
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
