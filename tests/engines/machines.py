"""Machines for tests of engines: real sshd servers and a real Slurm cluster, on loopback addresses of this machine."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PATIENCE_S = 30.0
NODES = ("127.0.0.2", "127.0.0.3")


def free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        return probe.getsockname()[1]


def wait_for_port(address: str, port: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        with socket.socket() as probe:
            if not probe.connect_ex((address, port)):
                return
        assert time.monotonic() < deadline, f"nothing answers at {address}:{port}"


@contextmanager
def ssh_servers(folder: Path) -> Iterator[Path]:
    """Run a server on each of two addresses; yield a folder for PATH, in which ``ssh`` knows them as near and far."""
    server = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    assert server is not None
    Path("/run/sshd").mkdir(exist_ok=True)
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    processes: list[subprocess.Popen[bytes]] = []
    lines: list[str] = []
    try:
        for name, address in zip(("near", "far"), NODES, strict=True):
            port = free_port(address)
            options = {
                "HostKey": folder / "host", "AuthorizedKeysFile": folder / "user.pub", "ListenAddress": address,
                "Port": port, "PidFile": "none", "StrictModes": "no", "UsePAM": "no", "PermitRootLogin": "yes",
            }  # fmt: skip
            words = [word for key, value in options.items() for word in ("-o", f"{key}={value}")]
            processes.append(subprocess.Popen([server, "-D", "-f", "/dev/null", *words]))
            wait_for_port(address, port)
            lines += [f"Host {name}", f"  HostName {address}", f"  Port {port}"]
        lines += [
            "Host *", f"  IdentityFile {folder / 'user'}", "  StrictHostKeyChecking no",
            "  UserKnownHostsFile /dev/null", "  LogLevel ERROR",
        ]  # fmt: skip
        (folder / "config").write_text("\n".join(lines))
        commands = folder / "bin"
        commands.mkdir()
        (commands / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder / "config"} "$@"\n')
        (commands / "ssh").chmod(0o755)
        yield commands
    finally:
        for process in processes:
            process.terminate()
            process.wait(PATIENCE_S)


_SLURM = """
ClusterName=two
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[Path]:
    """Run Slurm with the nodes one and two on two addresses; yield its configuration, for SLURM_CONF."""
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    (folder / "state").mkdir()
    found = "\n".join(
        f"NodeName={name} NodeHostname={socket.gethostname()} NodeAddr={address} Port={free_port(address)} "
        f"CPUs={os.cpu_count()} State=UNKNOWN"
        for name, address in zip(("one", "two"), NODES, strict=True)
    )
    config = folder / "slurm.conf"
    control = free_port("127.0.0.1")
    config.write_text(_SLURM.format(host=socket.gethostname(), control=control, folder=folder, nodes=found))
    environment = {**os.environ, "SLURM_CONF": str(config), "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
    munge = [
        "munged", "--foreground", "--force", f"--socket={folder}/munge.socket", f"--key-file={key}",
        f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log", f"--seed-file={folder}/munged.seed",
    ]  # fmt: skip
    processes: list[subprocess.Popen[bytes]] = []
    try:
        processes += [
            subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
            for command in (munge, ["slurmctld", "-D"], ["slurmd", "-D", "-N", "one"], ["slurmd", "-D", "-N", "two"])
        ]
        deadline = time.monotonic() + PATIENCE_S
        while True:
            states = subprocess.run(["sinfo", "-h", "-o", "%T %D"], env=environment, capture_output=True, text=True)
            if states.stdout.split() == ["idle", "2"]:
                break
            assert time.monotonic() < deadline, (states, (folder / "slurmctld.log").read_text())
            assert all(process.poll() is None for process in processes), states
        yield config
    finally:
        for process in reversed(processes):
            process.terminate()
            process.wait(PATIENCE_S)
