"""The kernel's side of the JupyterLab sidebar: a comm that sends the session's state and answers requests.

The browser sends ``{"kind": "refresh"}``, ``{"kind": "watch", "on": true}`` (the state is then sent each second, for a
minute), and ``{"kind": "request", "id": N, "topic": NAME, "arguments": {...}}``. Other messages are counted and
dropped.
Actions are not messages: the browser runs the line magic, which queues with the cells.
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
from accel_nb.ui.comm_routing import handle_beside_cells
from accel_nb.ui.messages import JsonNumber, MetricFact

logger = logging.getLogger(__name__)

TARGET = "accel_nb.sidebar"
PROTOCOL_VERSION = 3
WATCH_S = 1.0
LEASE_S = 60.0
"""Without a renewal, sending the state each second stops after this time: a page may close without a message."""
_NOTHING: Mapping[str, Any] = MappingProxyType({})

Answer = Callable[[Mapping[str, Any]], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class DeviceLine:
    """One device of this machine; sizes of memory in bytes."""

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
    """The log of one rank in the last cell; ``log`` is its name, different for each cell."""

    rank: int
    log: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class RunLine:
    """The run of the kernel's workers; null stands for unknown values."""

    title: str
    step: int
    fraction: JsonNumber
    """The part of the run, or else of the epoch, that is done, from 0 to 1."""
    remaining_s: JsonNumber
    losses: Sequence[MetricFact]


@dataclass(frozen=True, slots=True)
class SidebarState:
    """The state that the sidebar displays."""

    devices: Sequence[DeviceLine]
    pool: str
    workers: Sequence[WorkerLine] = ()
    notes: Sequence[str] = ()
    logs: Sequence[LogLine] = ()
    runs: str = ""
    """A stamp that changes when a run begins or ends; empty if no run is recorded."""
    run: RunLine | None = None
    """The cell that is running; None if none is."""

    def message(self) -> dict[str, Any]:
        """Return the state as a message."""
        return {
            "kind": "state",
            "version": PROTOCOL_VERSION,
            "devices": [asdict(device) for device in self.devices],
            "pool": {"state": self.pool, "workers": [asdict(worker) for worker in self.workers]},
            "notes": list(map(redact, self.notes)),
            "logs": [asdict(log) for log in self.logs],
            "runs": self.runs,
            "run": None if self.run is None else asdict(self.run),
        }


class SidebarComm:
    """Registers the target on a kernel, opens a comm to the browser, and keeps the open comms.

    ``describe`` and the functions in ``answers``, by topic, are called in the thread that receives the message, even
    while a cell runs, so they must only read snapshots. If one raises ValueError, a refusal with the error's text is
    sent. In plain IPython, which has no kernel, nothing is registered.
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
        self._sender: threading.Thread | None = None
        self._problem = ""
        self.num_dropped = 0
        self.expects_browser = False
        """Whether a comm was opened to the browser, and the browser has not closed it."""
        if self._manager is not None:
            try:
                self._manager.register_target(TARGET, self._on_open)
                self._open_comm()
            except Exception as error:  # the magics work without the sidebar
                logger.warning(
                    "the JupyterLab sidebar is off: no comm can be opened here (%s: %s); the magics work without it",
                    type(error).__name__,
                    error,
                )

    def push(self) -> None:
        """Send the state to every open sidebar, in a separate thread, so that no cell waits."""
        if self._comms:
            with self._lock:
                self._has_changed.set()
                self._start_sender()

    def close(self) -> None:
        """Unregister the target and close the comms; sidebars then report that the extension is not loaded."""
        self._ending.set()
        self._has_changed.set()
        if self._manager is not None:
            self._manager.unregister_target(TARGET, self._on_open)
            self._manager = None
        for comm in list(self._comms.values()):
            comm.close()
        self._comms.clear()

    def _open_comm(self) -> None:
        """Open a comm to the browser; a browser without the sidebar closes it."""
        comm = comm_class(self._manager)(target_name=TARGET, data=self._describe().message())
        self._add(comm)
        self.expects_browser = True
        comm.on_close(lambda _: self._on_browser_close(comm.comm_id))

    def _on_open(self, comm: Any, _message: Any) -> None:
        self._add(comm)
        comm.send(self._describe().message())

    def _add(self, comm: Any) -> None:
        handle_beside_cells(comm)
        self._comms[comm.comm_id] = comm
        comm.on_msg(lambda message: self._on_message(comm, message))
        comm.on_close(lambda _: self._remove(comm.comm_id))

    def _on_browser_close(self, comm_id: str) -> None:
        self.expects_browser = False
        self._remove(comm_id)

    def _remove(self, comm_id: str) -> None:
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
            case {"kind": "request", "id": int(number), "topic": str(topic), "arguments": dict(arguments)} if (
                topic in self._answers
            ):
                comm.send(self._answer(number, self._answers[topic], arguments))
            case _:
                self.num_dropped += 1
                logger.debug("dropped an unknown message of the sidebar")

    def _answer(self, number: int, answer: Answer, arguments: Mapping[str, Any]) -> dict[str, Any]:
        head = {"version": PROTOCOL_VERSION, "id": number}
        try:
            return {"kind": "answer", **head, "body": answer(arguments)}
        except ValueError as error:
            return {"kind": "refusal", **head, "text": str(error)}
        except Exception as error:  # the browser waits for a reply
            logger.exception("a query of the sidebar failed")
            return {"kind": "refusal", **head, "text": f"{type(error).__name__}: {error}"}

    def _watch(self, comm_id: str, is_on: bool) -> None:
        with self._lock:
            if is_on:
                self._watching[comm_id] = time.monotonic() + LEASE_S
            else:
                self._watching.pop(comm_id, None)
            if self._watching:
                self._start_sender()

    def _start_sender(self) -> None:
        if self._sender is None and not self._ending.is_set():
            self._sender = threading.Thread(target=self._send_states, name="accel_nb sidebar", daemon=True)
            self._sender.start()

    def _send_states(self) -> None:
        """Send the state to all sidebars after a change and each second to watching ones; return when none watches."""
        while True:
            self._has_changed.wait(WATCH_S)
            with self._lock:
                now = time.monotonic()
                self._watching = {comm: until for comm, until in self._watching.items() if until > now}
                receivers = list(self._comms if self._has_changed.is_set() else self._watching)
                self._has_changed.clear()
                if not receivers or self._ending.is_set():
                    self._sender = None
                    return
            try:
                message = self._describe().message()
                for comm in [self._comms[name] for name in receivers if name in self._comms]:
                    comm.send(message)
            except Exception as error:  # a state that cannot be read or sent now may be so later
                if (problem := f"{type(error).__name__}: {error}") != self._problem:
                    self._problem = problem
                    logger.exception("the sidebar shows an earlier state")


def comm_class(manager: Any) -> Callable[..., Any]:
    """Return the function that opens a comm by a kernel's comm manager.

    Versions of ipykernel before 6.18 do not use the package ``comm``. It may be installed nevertheless, but its comms
    would not reach a front end.
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
