"""Machines for tests of engines: real sshd servers, on loopback addresses of this machine."""

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
