"""The kernel's side of the JupyterLab sidebar: one comm target that describes the pool and answers refreshes.

Messages to the browser are ``SidebarState.message()``; the only one from the browser is ``{"kind": "refresh"}``.
Actions (stop, restart) are not messages: the browser runs the line magic, so that they queue with the cells.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from accel_nb.runtime.secrets import redact

logger = logging.getLogger(__name__)

TARGET = "accel_nb.sidebar"
PROTOCOL_VERSION = 1


@dataclass(frozen=True, slots=True)
class DeviceLine:
    """One device of this machine; memory in bytes."""

    name: str
    kind: str
    total_bytes: int


@dataclass(frozen=True, slots=True)
class WorkerLine:
    """One living worker."""

    rank: int
    device: str
    pid: int


@dataclass(frozen=True, slots=True)
class SidebarState:
    """What the sidebar shows."""

    devices: Sequence[DeviceLine]
    pool: str
    workers: Sequence[WorkerLine] = ()
    notes: Sequence[str] = ()

    def message(self) -> dict[str, Any]:
        """Return the state as the message that the sidebar takes."""
        return {
            "kind": "state",
            "version": PROTOCOL_VERSION,
            "devices": [asdict(device) for device in self.devices],
            "pool": {"state": self.pool, "workers": [asdict(worker) for worker in self.workers]},
            "notes": list(map(redact, self.notes)),
        }


class SidebarComm:
    """Registers the target on a kernel and keeps the open comms.

    ``describe`` is called in whatever thread a message arrives on (a running cell does not delay it), so it must only
    read a snapshot. In plain IPython, without a kernel, nothing is registered.
    """

    def __init__(self, shell: Any, describe: Callable[[], SidebarState]) -> None:
        self._manager = getattr(getattr(shell, "kernel", None), "comm_manager", None)
        self._describe = describe
        self._comms: dict[str, Any] = {}
        if self._manager is not None:
            self._manager.register_target(TARGET, self._on_open)

    def push(self) -> None:
        """Send the state to every open sidebar; does nothing when there is none."""
        if self._comms:
            message = self._describe().message()
            for comm in list(self._comms.values()):
                comm.send(message)

    def close(self) -> None:
        """Take the target away and close the comms: the sidebars show that the extension is not loaded."""
        if self._manager is not None:
            self._manager.unregister_target(TARGET, self._on_open)
            self._manager = None
        for comm in list(self._comms.values()):
            comm.close()
        self._comms.clear()

    def _on_open(self, comm: Any, _message: Any) -> None:
        self._comms[comm.comm_id] = comm
        comm.on_msg(lambda message: self._on_message(comm, message))
        comm.on_close(lambda _: self._comms.pop(comm.comm_id, None))
        comm.send(self._describe().message())

    def _on_message(self, comm: Any, message: Any) -> None:
        data = message.get("content", {}).get("data", {})
        if isinstance(data, dict) and data.get("kind") == "refresh":
            comm.send(self._describe().message())
        else:
            logger.debug("the sidebar sent something unknown")
