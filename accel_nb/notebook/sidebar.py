"""What the JupyterLab sidebar is told about a session."""

from __future__ import annotations

from accel_nb.notebook.session import Session
from accel_nb.runtime.hardware import inspect_machine
from accel_nb.ui.comm import DeviceLine, SidebarState, WorkerLine


def describe_state(session: Session) -> SidebarState:
    """Describe devices and pool; reads only, so that it may run beside a busy cell."""
    machine, status = inspect_machine(), session.status()
    cpu = DeviceLine(f"{machine.num_cores} CPU cores", "cpu", machine.total_bytes)
    gpus = [DeviceLine(gpu.name, "cuda", gpu.total_bytes) for gpu in machine.gpus]
    workers = [
        WorkerLine(rank, spec.device, status.pids[rank])
        for rank, spec in enumerate(status.specs)
        if rank in status.pids
    ]
    notes = [f"{name} is only on the workers: {reason}" for name, reason in status.kept.items()]
    return SidebarState([*gpus, cpu], status.state, workers, notes)
