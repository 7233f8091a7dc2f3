"""Routing of a comm's messages among the kernel's subshells."""

from __future__ import annotations

from typing import Any


def handle_on_addressed_subshell(comm: Any) -> None:
    """Handle a comm's messages on the subshell that JupyterLab addressed, also while a cell runs.

    ipykernel from 7.4 on routes a message from the browser to the shell that last sent on the comm, for cells that wait
    for a widget's reply. A running cell that draws would thereby route messages to the main shell, which handles them
    after the cell. ipykernel has no public setting for it; other versions ignore this attribute.
    """
    comm._reply_subshell_for = lambda _data, addressed: addressed
