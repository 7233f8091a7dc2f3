"""Jobs over several machines: PyTorch's elastic agent on each starts and monitors the ranks there."""

from __future__ import annotations

import ipaddress
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from accel_nb.launch.local_job import POLL_S, TIMED_OUT, JobResult
from accel_nb.launch.rank_task import MODULE, RankTask
from accel_nb.launch.request import Machines
from accel_nb.notebook.session.interrupts import count_interrupts
from accel_nb.pool.control.stop_escalation import FINISH_TIMEOUT_S
from accel_nb.runtime.process.environment import all_variables
from accel_nb.runtime.process.loopback import find_loopback

AGENT = "torch.distributed.run"
AGENT_TIMEOUT_S = FINISH_TIMEOUT_S + 5


def agent_command(
    machines: Machines,
    num_ranks: int,
    max_restarts: int,
    task: RankTask,
    args: Sequence[str],
    *,
    is_host: bool | None = None,
) -> list[str]:
    """Return the command that starts the agent of this machine; ``is_host``: this machine hosts the rendezvous."""
    assert machines.endpoint is not None, "a request over several machines has an endpoint"
    words = [sys.executable, "-m", AGENT, "--nnodes", machines.nnodes, "--nproc-per-node", str(num_ranks)]
    if machines.node_rank is not None:
        words += ["--node-rank", str(machines.node_rank)]
    words += ["--rdzv-backend", machines.backend, "--rdzv-endpoint", machines.endpoint, "--rdzv-id", machines.id]
    if is_host is not None:
        words += ["--rdzv-conf", f"is_host={is_host}"]
    return [*words, "--max-restarts", str(max_restarts), "-m", MODULE, task.to_json(), *args]


def agent_variables(machines: Machines, num_threads: int, overrides: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the agent and its ranks."""
    variables = {"OMP_NUM_THREADS": str(num_threads), **all_variables(), **overrides}
    if _is_loopback(machines.endpoint or ""):
        variables["GLOO_SOCKET_IFNAME"] = find_loopback()
    return variables


def run_agent(command: Sequence[str], variables: Mapping[str, str], *, timeout_s: float | None) -> JobResult:
    """Run the agent to its end, and forward interrupts; it forwards them to its ranks. Return its exit code."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    is_late, num_handled, kill_at = False, 0, None
    with count_interrupts(terminations=True) as interrupts:
        process = subprocess.Popen(command, env=variables, stdin=subprocess.DEVNULL, start_new_session=True)
        try:
            while True:
                try:
                    code = process.wait(POLL_S)
                    break
                except subprocess.TimeoutExpired:
                    now = time.monotonic()
                is_late = is_late or (deadline is not None and now > deadline)
                if kill_at is None and (interrupts() or is_late):
                    kill_at, num_handled = now + AGENT_TIMEOUT_S, interrupts()
                    process.send_signal(signal.SIGTERM)
                elif kill_at is not None and (interrupts() > num_handled or now > kill_at):
                    process.kill()  # its ranks end with it
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if interrupts():
        return JobResult(128 + (signal.SIGTERM if interrupts.has_sigterm else signal.SIGINT), "interrupted")
    if is_late:
        return JobResult(TIMED_OUT, "timeout", ("the job ran longer than its timeout, and was stopped",))
    return JobResult(code if code >= 0 else 128 - code, "failed" if code else None)


def _is_loopback(endpoint: str) -> bool:
    host = endpoint.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
