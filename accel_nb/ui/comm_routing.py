"""The handling of a comm's messages beside the cell that runs."""

from __future__ import annotations

from typing import Any


def handle_beside_cells(comm: Any) -> None:
    """Handle a comm's messages on the subshell that JupyterLab addressed, even while a cell runs, and not as a cell.

    From version 7.4 on, ipykernel routes a message from the browser to the shell that last sent on the comm, to support
    cells that wait for a widget's reply. A running cell that draws a panel is in the main shell, which would handle the
    panel's messages only after the cell. ipykernel has no public setting for this; other versions ignore the attribute.

    The package comm triggers IPython's events ``pre_execute`` and ``post_execute`` around each message, since handlers
    may plot. On a subshell that is in the middle of the user's cell: matplotlib would show and close the figures that
    the cell is still drawing. The handlers of our comms plot nothing, so theirs are called without the events.
    """

    def handle(message: Any) -> None:
        if comm._msg_callback is not None:
            comm._msg_callback(message)

    comm._reply_subshell_for = lambda _data, addressed: addressed
    comm.handle_msg = handle
