"""Where in the kernel a comm's messages from the browser are taken."""

from __future__ import annotations

from typing import Any


def hear_beside_cells(comm: Any) -> None:
    """Have a comm's messages taken on the subshell to which JupyterLab addressed them, also while a cell runs.

    ipykernel from 7.4 on sends a message from the browser to the shell that last sent on its comm, for cells that wait
    for a widget's reply. Ours wait for none: a running cell that draws would turn all that is asked of it to the main
    shell, which hears it when the cell has ended. ipykernel has no public way to say so; other versions do not look.
    """
    comm._reply_subshell_for = lambda _data, addressed: addressed
