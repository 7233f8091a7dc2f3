"""The kernel's side of the JupyterLab sidebar: a comm that describes the session and answers what the browser asks.

To the browser go the state, and answers. From it come ``{"kind": "refresh"}``, ``{"kind": "watch", "on": true}`` (the
state is then told each second, for a minute), and ``{"kind": "ask", "id": N, "about": NAME, "given": {...}}``.
Anything else is counted and dropped. Actions are no messages: the browser runs the line magic, which queues with the
cells.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

from accel_nb.runtime.process.secrets import redact
from accel_nb.ui.comm_routing import hear_beside_cells

logger = logging.getLogger(__name__)

TARGET = "accel_nb.sidebar"
PROTOCOL_VERSION = 2
WATCH_S = 1.0
LEASE_S = 60.0
"""How long a browser that does not ask again is told the state each second; its page may be gone without a word."""
_NOTHING: Mapping[str, Any] = MappingProxyType({})

Answer = Callable[[Mapping[str, Any]], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class DeviceLine:
    """One device of this machine; memory in bytes."""

    name: str
    kind: str
    total_bytes: int
    free_bytes: int = 0


@dataclass(frozen=True, slots=True)
class WorkerLine:
    """One living worker; its resident memory in bytes, 0 where it cannot be read."""

    rank: int
    device: str
    pid: int
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class LogLine:
    """What one rank has printed in the last cell: ``log`` tells one cell's from another's."""

    rank: int
    log: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class SidebarState:
    """What the sidebar shows."""

    devices: Sequence[DeviceLine]
    pool: str
    workers: Sequence[WorkerLine] = ()
    notes: Sequence[str] = ()
    logs: Sequence[LogLine] = ()
    runs: str = ""
    """Another text when runs have begun or ended; empty where none is recorded."""

    def message(self) -> dict[str, Any]:
        """Return the state as the message that the sidebar takes."""
        return {
            "kind": "state",
            "version": PROTOCOL_VERSION,
            "devices": [asdict(device) for device in self.devices],
            "pool": {"state": self.pool, "workers": [asdict(worker) for worker in self.workers]},
            "notes": list(map(redact, self.notes)),
            "logs": [asdict(log) for log in self.logs],
            "runs": self.runs,
        }


class SidebarComm:
    """Registers the target on a kernel, calls the browser, and keeps the open comms.

    ``describe`` and the ``answers``, by what they are about, are called in whatever thread a message arrives on (a
    running cell does not delay it), so they must only read snapshots. An answer that raises ValueError is a refusal
    with its text. In plain IPython, without a kernel, nothing is registered.
    """

    def __init__(
        self, shell: Any, describe: Callable[[], SidebarState], answers: Mapping[str, Answer] = _NOTHING
    ) -> None:
        self._manager = getattr(getattr(shell, "kernel", None), "comm_manager", None)
        self._describe = describe
        self._answers = answers
        self._comms: dict[str, Any] = {}
        self._watching: dict[str, float] = {}
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._has_changed = threading.Event()
        self._teller: threading.Thread | None = None
        self.num_dropped = 0
        self.is_called = False
        """Whether a browser was called and has not hung up."""
        if self._manager is not None:
            try:
                self._manager.register_target(TARGET, self._on_open)
                self._call()
            except Exception as error:  # the magics need no sidebar
                logger.warning(
                    "the JupyterLab sidebar is off: no comm can be opened here (%s: %s); the magics work without it",
                    type(error).__name__,
                    error,
                )

    def push(self) -> None:
        """Have the state sent to every open sidebar, in a thread: no cell waits for it."""
        if self._comms:
            with self._lock:
                self._has_changed.set()
                self._start_telling()

    def close(self) -> None:
        """Take the target away and close the comms: the sidebars show that the extension is not loaded."""
        self._ending.set()
        self._has_changed.set()
        if self._manager is not None:
            self._manager.unregister_target(TARGET, self._on_open)
            self._manager = None
        for comm in list(self._comms.values()):
            comm.close()
        self._comms.clear()

    def _call(self) -> None:
        """Open a comm to the browser: one that has the sidebar takes it, any other closes it."""
        comm = _comm_class(self._manager)(target_name=TARGET, data=self._describe().message())
        self._keep(comm)
        self.is_called = True
        comm.on_close(lambda _: self._hang_up(comm.comm_id))

    def _on_open(self, comm: Any, _message: Any) -> None:
        self._keep(comm)
        comm.send(self._describe().message())

    def _keep(self, comm: Any) -> None:
        hear_beside_cells(comm)
        self._comms[comm.comm_id] = comm
        comm.on_msg(lambda message: self._on_message(comm, message))
        comm.on_close(lambda _: self._forget(comm.comm_id))

    def _hang_up(self, comm_id: str) -> None:
        self.is_called = False
        self._forget(comm_id)

    def _forget(self, comm_id: str) -> None:
        self._comms.pop(comm_id, None)
        with self._lock:
            self._watching.pop(comm_id, None)

    def _on_message(self, comm: Any, message: Any) -> None:
        data = message.get("content", {}).get("data", {})
        match data:
            case {"kind": "refresh"}:
                comm.send(self._describe().message())
            case {"kind": "watch", "on": bool(is_on)}:
                self._watch(comm.comm_id, is_on)
            case {"kind": "ask", "id": int(number), "about": str(about), "given": dict(given)} if (
                about in self._answers
            ):
                comm.send(self._answer(number, self._answers[about], given))
            case _:
                self.num_dropped += 1
                logger.debug("the sidebar sent something unknown")

    def _answer(self, number: int, answer: Answer, given: Mapping[str, Any]) -> dict[str, Any]:
        head = {"version": PROTOCOL_VERSION, "id": number}
        try:
            return {"kind": "answer", **head, "body": answer(given)}
        except ValueError as error:
            return {"kind": "refusal", **head, "text": str(error)}

    def _watch(self, comm_id: str, is_on: bool) -> None:
        with self._lock:
            if is_on:
                self._watching[comm_id] = time.monotonic() + LEASE_S
            else:
                self._watching.pop(comm_id, None)
            if self._watching:
                self._start_telling()

    def _start_telling(self) -> None:
        if self._teller is None and not self._ending.is_set():
            self._teller = threading.Thread(target=self._tell, name="accel_nb sidebar", daemon=True)
            self._teller.start()

    def _tell(self) -> None:
        """Tell every sidebar of a change, and those that watch each second, as long as there is either."""
        while True:
            self._has_changed.wait(WATCH_S)
            with self._lock:
                now = time.monotonic()
                self._watching = {comm: until for comm, until in self._watching.items() if until > now}
                told = list(self._comms if self._has_changed.is_set() else self._watching)
                self._has_changed.clear()
                if not told or self._ending.is_set():
                    self._teller = None
                    return
            message = self._describe().message()
            for comm in [self._comms[name] for name in told if name in self._comms]:
                comm.send(message)


def _comm_class(manager: Any) -> Callable[..., Any]:
    """Return what opens a comm that a kernel's comm manager serves.

    ipykernel before 6.18 does not use the package ``comm``, which may be installed beside it: comms of that package
    would reach no front end there.
    """
    try:
        import comm
        from comm.base_comm import CommManager
    except ImportError:
        pass
    else:
        if isinstance(manager, CommManager):
            return comm.create_comm
    from ipykernel.comm import Comm

    return Comm
