"""Starts workers on other machines by a command such as ssh or kubectl exec.

The command runs a process there, the agent, which starts the workers as on this machine. Messages travel over the
standard streams of the command, so nothing of ours listens on a port.
"""

from __future__ import annotations

import json
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from accel_nb.config.engine_section import LOCALHOST, EngineOptions
from accel_nb.errors import ConfigError, PoolError
from accel_nb.pool.engine import EngineRequest
from accel_nb.pool.nodes.agent import AGENT, AgentLink
from accel_nb.pool.nodes.engine import NodesEngine
from accel_nb.pool.nodes.host import HostSettings, describe_differences, own_versions, with_hash_seed

START_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine on which workers run, and the command that starts a program there."""

    name: str
    address: str
    command: tuple[str, ...]
    needs_quoting: bool = False
    """Whether a shell on the machine splits the text after the command into words."""
    remedy: str = ""
    """What to do if the command ends with status 255, as ssh does without a connection."""


def named_machines(
    options: EngineOptions, address_of: Callable[[str], str], make_machine: Callable[[str, str, str], Machine]
) -> list[Machine]:
    """Return the first machines that the options name, as many as there are nodes.

    ``address_of`` returns the address of a host, and ``make_machine(host, name, address)`` its machine.
    ``localhost`` is this machine, which needs no command. Raise ConfigError if too few are named.
    """
    if len(options.hosts) < options.nodes:
        raise ConfigError(
            f"--nodes {options.nodes} was requested, and engine.hosts names {len(options.hosts)}; name as many with "
            "--engine.hosts HOST,HOST"
        )
    hosts = options.hosts[: options.nodes]
    addresses = {host: address_of(host) for host in hosts if host != LOCALHOST}
    others = list(addresses.values())
    own_address = own_address_towards(others[0]) if others else "127.0.0.1"
    machines: list[Machine] = []
    for number, host in enumerate(hosts):
        repeated = hosts[:number].count(host)
        name = f"{host}-{repeated + 1}" if repeated else host
        machines.append(
            Machine(name, own_address, ()) if host == LOCALHOST else make_machine(host, name, addresses[host])
        )
    return machines


def start_agents(
    request: EngineRequest, machines: Sequence[Machine], on_stop: Callable[[], None] = lambda: None
) -> NodesEngine:
    """Start an agent on each machine; ``on_stop`` is called when the engine stops.

    Raise ConfigError or PoolError, with the remedy, if that is not possible; nothing is left running then.
    """
    options = request.options
    python = options.python or sys.executable
    with ThreadPoolExecutor(len(machines)) as executor:
        for _ in executor.map(lambda machine: check_machine(machine, python), machines):
            pass
    links: list[AgentLink] = []
    overrides = with_hash_seed(request.overrides)
    try:
        for number, machine in enumerate(machines):
            settings = HostSettings(
                program=request.program,
                preload=tuple(request.preload),
                node=number,
                address=machines[0].address,
                own_address=machine.address,
                lease_s=options.lease_s,
                overrides=overrides,
                is_local=not machine.command,
            )
            links.append(AgentLink(machine.name, _on(machine, [python]), settings))
        for link in links:
            if not link.wait_for_start(START_TIMEOUT_S):
                raise PoolError(f"{link.name} started no agent within {START_TIMEOUT_S:g} s")
    except BaseException:
        for link in links:
            link.close()
            link.release()
        raise
    return NodesEngine(links, lost_after_s=options.lost_after_s, on_stop=on_stop)


def check_machine(machine: Machine, python: str) -> None:
    """Raise ConfigError if a machine cannot be reached, cannot start an agent, or has other versions than this one."""
    try:
        done = subprocess.run(
            [*_on(machine, [python]), "-m", AGENT, "--versions"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=START_TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError:
        if machine.command:
            raise ConfigError(f"{machine.command[0]} is not installed on this machine") from None
        raise ConfigError(_no_python(machine, python, "no such file")) from None
    except subprocess.TimeoutExpired:
        raise PoolError(
            f"{machine.name} did not start a process within {START_TIMEOUT_S:g} s by `{shlex.join(machine.command)}`"
        ) from None
    try:
        found: Mapping[str, str] = json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        raise ConfigError(_why_not_started(machine, python, done)) from None
    if problem := describe_differences(machine.name, found, own_versions()):
        raise ConfigError(problem)


def _why_not_started(machine: Machine, python: str, done: subprocess.CompletedProcess[str]) -> str:
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    reason = lines[-1] if lines else f"exit status {done.returncode}"
    if "No module named" in reason and "accel_nb" in reason:
        return f"{machine.name} has no accel_nb for {python}; on it: {python} -m pip install accel_nb"
    if done.returncode == 127 or "no such file" in reason.lower():
        return _no_python(machine, python, reason)
    if machine.remedy and done.returncode == 255:
        return f"{machine.command[0]} did not connect to {machine.name}: {reason}. {machine.remedy}"
    return f"accel_nb could not be started on {machine.name}: {reason}"


def _no_python(machine: Machine, python: str, reason: str) -> str:
    return f"{machine.name} has no {python} ({reason}); name its Python that has accel_nb with --engine.python PATH"


def _on(machine: Machine, words: Sequence[str]) -> list[str]:
    """Return a command that runs ``words`` on a machine."""
    return [*machine.command, *(map(shlex.quote, words) if machine.needs_quoting else words)]


def resolve_address(name: str, what: str) -> str:
    """Return the numeric address of a name; ``what`` is the name's description in an error."""
    try:
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConfigError(
            f"{what} has no address: {error.strerror or error}; workers of all nodes connect by it"
        ) from None


def own_address_towards(address: str) -> str:
    """Return this machine's address on the network of another; nothing is sent."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        return str(probe.getsockname()[0])


def run_command(command: Sequence[str]) -> str:
    """Return the output of a command; raise ConfigError if it fails or does not end."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=START_TIMEOUT_S, check=False
        )
    except FileNotFoundError:
        raise ConfigError(f"{command[0]} is not installed on this machine") from None
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"`{shlex.join(command)}` did not end within {START_TIMEOUT_S:g} s; run it in a terminal to see what it "
            "waits for, such as a password or a server that does not answer"
        ) from None
    if done.returncode:
        raise ConfigError(f"`{shlex.join(command)}` failed: {done.stderr.strip() or done.returncode}")
    return done.stdout
