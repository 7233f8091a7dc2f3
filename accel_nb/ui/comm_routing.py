"""Routing of a comm's messages among the kernel's subshells."""

from __future__ import annotations

from typing import Any


def handle_on_addressed_subshell(comm: Any) -> None:
    """Handle a comm's messages on the subshell that JupyterLab addressed, even while a cell runs.

    From version 7.4 on, ipykernel routes a message from the browser to the shell that last sent on the comm, to support
    cells that wait for a widget's reply. A running cell that draws a panel is in the main shell, which would handle the
    panel's messages only after the cell. ipykernel has no public setting for this; other versions ignore the attribute.
    """
    comm._reply_subshell_for = lambda _data, addressed: addressed
