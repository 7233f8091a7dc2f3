"""A Slurm of two virtual machines on this one: its daemons run in a folder of their own and bind to loopback only.

Debian: ``apt-get install --no-install-recommends slurmctld slurmd slurm-client munge``; it takes root to run.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.conftest import wait_for

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "sinfo", "squeue")
START_S = 40.0


def is_installed() -> bool:
    """Whether the daemons are there, and may be started."""
    return os.geteuid() == 0 and all(map(shutil.which, PROGRAMS))


@contextmanager
def running_slurm(folder: Path) -> Iterator[dict[str, str]]:
    """Run the cluster and give the variables by which Slurm's commands find it."""
    folder.chmod(0o755)
    (folder / "state").mkdir()
    (folder / "key").write_bytes(os.urandom(1024))
    (folder / "key").chmod(0o400)
    ports = _free_ports(3)
    conf = folder / "slurm.conf"
    conf.write_text(
        f"""\
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
MpiDefault=none
ReturnToService=2
SchedulerParameters=sched_interval=1
KillWait=60
NodeName=one NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1
NodeName=two NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1
PartitionName=main Nodes=ALL Default=YES State=UP
"""
    )
    variables = {**os.environ, "SLURM_CONF": str(conf)}
    munge = [
        "munged", "--foreground", f"--socket={folder}/munge", f"--key-file={folder}/key",
        f"--pid-file={folder}/munge.pid", f"--log-file={folder}/munge.log", f"--seed-file={folder}/seed",
        "--num-threads=1", "--force",
    ]  # fmt: skip
    with ExitStack() as stack:
        _daemon(stack, munge, variables)
        assert wait_for((folder / "munge").exists, START_S)
        _daemon(stack, ["slurmctld", "-D", "-f", str(conf)], variables)
        for node in ("one", "two"):
            _daemon(stack, ["slurmd", "-D", "-N", node, "-f", str(conf)], variables)
        assert wait_for(lambda: _num_idle(variables) == 2, START_S), (folder / "slurmctld.log").read_text()[-3000:]
        yield variables


def _num_idle(variables: dict[str, str]) -> int:
    done = subprocess.run(
        ["sinfo", "-h", "-t", "idle", "-o", "%D"], env=variables, capture_output=True, text=True, check=False
    )
    return int(done.stdout.strip() or 0) if done.returncode == 0 else 0


def _daemon(stack: ExitStack, command: list[str], variables: dict[str, str]) -> None:
    process = subprocess.Popen(
        command, env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )

    def end() -> None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    stack.callback(end)


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for item in sockets:
            item.bind(("127.0.0.1", 0))
        return [item.getsockname()[1] for item in sockets]
