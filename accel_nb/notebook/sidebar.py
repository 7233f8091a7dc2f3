"""The kernel's side of the JupyterLab sidebar: the state of a session, and the handlers of the sidebar's requests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from typing import Any

import psutil

from accel_nb.config import Layer, environment_layer, parse_flags, resolve
from accel_nb.config.flags import MAX_LINE, value_text
from accel_nb.errors import AccelNbError, ConfigError
from accel_nb.notebook.reports.recent_runs import (
    compare_runs,
    describe_run,
    label_run,
    list_recent_runs,
    recent_runs_version,
)
from accel_nb.notebook.session.run_state import CellRun
from accel_nb.notebook.session.session import Session
from accel_nb.pool.device_assignment import assign_workers
from accel_nb.runtime.process.environment import option_variables
from accel_nb.runtime.process.hardware import inspect_machine
from accel_nb.ui.comm import Answer, DeviceLine, LogLine, RunLine, SidebarState, WorkerLine

NOTEBOOK_SOURCE = "this notebook's settings"
MAX_SETTINGS = 256
POLL_S = 0.5


def describe_state(session: Session) -> SidebarState:
    """Return the state of devices and pool. It changes nothing, so it may be called while a cell runs."""
    machine, status = inspect_machine(), session.status()
    cpu = DeviceLine(f"{machine.num_cores} CPU cores", "cpu", machine.total_bytes, machine.free_bytes)
    gpus = [DeviceLine(gpu.name, "cuda", gpu.total_bytes, gpu.free_bytes) for gpu in machine.gpus]
    workers = [
        WorkerLine(
            rank,
            f"{spec.device} on {status.nodes[spec.node]}" if status.nodes else spec.device,
            status.pids[rank],
            status.resident_bytes.get(rank, 0) if status.nodes else _resident_bytes(status.pids[rank]),
        )
        for rank, spec in enumerate(status.specs)
        if rank in status.pids
    ]
    state = status.state
    if state == "starting" and session.last_run is not None and session.last_run.status != "running":
        state = "ready"  # workers were replaced after an interrupt; the pool updates its state with the next cell
    notes = [f"{name} is only on the workers: {reason}" for name, reason in status.only_on_workers.items()]
    logs = [LogLine(rank, log.name, log.num_bytes) for rank, log in session.logs.items()]
    return SidebarState(
        [*gpus, cpu], state, workers, notes, logs, recent_runs_version(), _describe_running(session.last_run)
    )


def _describe_running(run: CellRun | None) -> RunLine | None:
    """Return the figures of a run that has not ended."""
    if run is None or run.status != "running":
        return None
    facts = run.output.panel_facts()
    progress = facts["progress"]
    fraction = progress["batch_fraction"] if progress["fraction"] is None else progress["fraction"]
    return RunLine(facts["title"], facts["step"], fraction, progress["remaining_s"], facts["losses"][:4])


def poll_until_warm(session: Session) -> None:
    """Poll between cells until the zygote is ready, then report the change. Does nothing without a running loop."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return

    def poll() -> None:
        if session.status().state == "warming up":
            session.poll()
            if session.status().state == "warming up":
                loop.call_later(POLL_S, poll)
            else:
                session.on_change()

    loop.call_later(POLL_S, poll)


def _resident_bytes(pid: int) -> int:
    try:
        return psutil.Process(pid).memory_info().rss
    except psutil.Error:
        return 0


class NotebookSettings:
    """The options in a notebook's metadata, as the browser sends them: the layer ``notebook``."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._is_set = threading.Event()

    def set_options(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Set the options of the cells from now on, given as ``{"settings": {"precision": "bf16"}}``."""
        self._session.notebook_layers = settings_layers(arguments.get("settings"))
        self._is_set.set()
        return {"taken": True}

    def wait(self, deadline_s: float) -> None:
        """Wait until the browser has sent the options or the deadline has passed. Later calls return at once."""
        self._is_set.wait(deadline_s)
        self._is_set.set()


def settings_layers(settings: object) -> tuple[Layer, ...]:
    """Return the layer of a notebook's settings, none if they are empty. Raise ValueError if they are not a dict."""
    if not isinstance(settings, dict) or len(settings) > MAX_SETTINGS:
        raise ValueError(f"settings are names of options with their values, at most {MAX_SETTINGS}")
    return (Layer("notebook", settings, NOTEBOOK_SOURCE),) if settings else ()


def request_handlers(session: Session, settings: NotebookSettings) -> Mapping[str, Answer]:
    """Return the handlers of the sidebar's requests by name."""
    return {
        "notebook": settings.set_options,
        "options": explain_options,
        "log": lambda arguments: read_log(session, arguments),
        "runs": list_recent_runs,
        "run": describe_run,
        "label run": label_run,
        "compare runs": compare_runs,
    }


def explain_options(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Resolve a magic's ``line`` over a notebook's ``settings``; return each option's value and origin, or problems."""
    line = arguments.get("line")
    if not isinstance(line, str) or len(line) > MAX_LINE:
        raise ValueError(f"a line is text of at most {MAX_LINE} characters")
    layers = [environment_layer(option_variables()), *settings_layers(arguments.get("settings"))]
    try:
        resolved = resolve([*layers, parse_flags(line, "%%accelerate")])
    except ConfigError as error:
        return {"problems": error.problems, "notes": [], "devices": [], "rows": []}
    rows = [
        {"option": row.option, "value": value_text(row.value), "layer": row.origin.layer, "source": row.origin.source}
        for row in resolved.explain()
    ]
    answer = {"problems": [], "notes": list(resolved.notes), "devices": [], "rows": rows}
    config = resolved.config
    try:
        specs = assign_workers(config)
        resolved.check_world(len(specs))
    except AccelNbError as error:
        return answer | {"problems": str(error).splitlines()}
    return answer | {"devices": [spec.device for spec in specs]}


def read_log(session: Session, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return a rank's output after byte ``seen`` if ``log`` is still the log's name, else all stored output."""
    rank, name, seen = arguments.get("rank"), arguments.get("log"), arguments.get("seen")
    if not isinstance(rank, int) or not isinstance(seen, int) or rank not in session.logs:
        raise ValueError(f"there is no log of rank {str(rank)[:20]}")
    log = session.logs[rank]
    text, start, end = log.text_since(seen if name == log.name else 0)
    return {"rank": rank, "log": log.name, "text": text, "start": start, "end": end}
