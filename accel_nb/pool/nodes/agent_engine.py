"""Workers on machines that ssh or Slurm reaches: on each, an agent behind a command hosts the local engine.

Frames travel over the standard streams of the command, so nothing of ours listens on a port.
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
from accel_nb.runtime.process.environment import get_variables

START_TIMEOUT_S = 60.0
CONNECT_S = 10
_JOB_VARIABLES = ("SLURM_JOB_ID", "SLURM_JOB_NODELIST")


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine on which workers run, and the command that starts a program there."""

    name: str
    address: str
    command: tuple[str, ...]


def start_ssh_engine(request: EngineRequest) -> NodesEngine:
    """Start an agent by ssh on each of the first hosts of the options, as many as there are nodes.

    Raise ConfigError, with the remedy, if that is not possible; nothing is left running then.
    """
    options = request.options
    if len(options.hosts) < options.nodes:
        raise ConfigError(
            f"--nodes {options.nodes} was asked for, and engine.hosts names {len(options.hosts)}; name as many with "
            "--engine.hosts HOST,HOST"
        )
    hosts = options.hosts[: options.nodes]
    addresses = {host: _address_behind_ssh(host) for host in hosts if host != LOCALHOST}
    others = list(addresses.values())
    if LOCALHOST in hosts:
        addresses[LOCALHOST] = _own_address_towards(others[0]) if others else "127.0.0.1"
    machines = [
        Machine(_name_of_node(hosts, number), addresses[host], _ssh_command(host)) for number, host in enumerate(hosts)
    ]
    return _start(request, machines, lambda: None)


def start_slurm_engine(request: EngineRequest) -> NodesEngine:
    """Start an agent by srun on each node: of the job that this process runs in, else of a job of its own.

    Raise ConfigError, with the remedy, if that is not possible; nothing is left running then.
    """
    options = request.options
    variables = get_variables(*_JOB_VARIABLES)
    allocation = None if len(variables) == len(_JOB_VARIABLES) else _Allocation(options)
    try:
        granted = (allocation.job, allocation.nodes) if allocation else map(variables.__getitem__, _JOB_VARIABLES)
        job, listed = granted
        names = _run(["scontrol", "show", "hostnames", listed]).split()
        if len(names) < options.nodes:
            raise ConfigError(
                f"--nodes {options.nodes} was asked for, and Slurm's job {job} has {len(names)} ({', '.join(names)}); "
                "ask for fewer, or start the notebook in a larger job"
            )
        machines = [Machine(name, _address_in_slurm(name), _srun_command(job, name)) for name in names[: options.nodes]]
        return _start(request, machines, lambda: None if allocation is None else allocation.release())
    except BaseException:
        if allocation is not None:
            allocation.release()
        raise


def _start(request: EngineRequest, machines: Sequence[Machine], on_stop: Callable[[], None]) -> NodesEngine:
    options = request.options
    python = options.python or sys.executable
    with ThreadPoolExecutor(len(machines)) as pool:
        for _ in pool.map(lambda machine: check_machine(machine, python), machines):
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
            )
            links.append(AgentLink(machine.name, _on(machine, [python]), settings))
        for link in links:
            if not link.wait_for_start(START_TIMEOUT_S):
                raise PoolError(f"{link.name} started no agent within {START_TIMEOUT_S:g} s")
    except BaseException:
        for link in links:
            link.close()
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
    if done.returncode == 127 or "No such file" in reason:
        return _no_python(machine, python, reason)
    if machine.command and machine.command[0] == "ssh" and done.returncode == 255:
        return (
            f"ssh did not connect to {machine.name}: {reason}. `ssh {machine.name} true` must work without a question; "
            "keys, users and ports are read from ~/.ssh/config"
        )
    return f"{machine.name} cannot start a host: {reason}"


def _no_python(machine: Machine, python: str, reason: str) -> str:
    return f"{machine.name} has no {python} ({reason}); name its Python that has accel_nb with --engine.python PATH"


def _on(machine: Machine, words: Sequence[str]) -> list[str]:
    """Return a command that runs ``words`` on a machine; the shell at the end of ssh splits its text into words."""
    is_shell = bool(machine.command) and machine.command[0] == "ssh"
    return [*machine.command, *(map(shlex.quote, words) if is_shell else words)]


# --- ssh ---


def _name_of_node(hosts: Sequence[str], number: int) -> str:
    """Return the host of a node, with a number if this machine stands for several."""
    repeated = hosts[:number].count(hosts[number])
    return f"{hosts[number]}-{repeated + 1}" if repeated else hosts[number]


def _ssh_command(host: str) -> tuple[str, ...]:
    if host == LOCALHOST:
        return ()
    options = ("BatchMode=yes", f"ConnectTimeout={CONNECT_S}", "ServerAliveInterval=5")
    return ("ssh", "-T", *(word for option in options for word in ("-o", option)), "--", host)


def _address_behind_ssh(host: str) -> str:
    """Return the address of a host, which may be an alias in ssh's configuration."""
    settings = _run(["ssh", "-G", "--", host]).splitlines()
    name = next((line.removeprefix("hostname ") for line in settings if line.startswith("hostname ")), host)
    return _resolve(name, f"{host} of engine.hosts")


def _resolve(name: str, what: str) -> str:
    try:
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConfigError(
            f"{what} has no address: {error.strerror or error}; workers of all nodes connect by it"
        ) from None


def _own_address_towards(address: str) -> str:
    """Return this machine's address on the network of another; nothing is sent."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        return str(probe.getsockname()[0])


# --- Slurm ---


class _Allocation:
    """A Slurm job of this process: it ends with `release`, or with this process, which closes the input of ``cat``."""

    def __init__(self, options: EngineOptions) -> None:
        allocation_flags = shlex.split(options.allocation or "--exclusive")
        command = ["salloc", f"--nodes={options.nodes}", "--ntasks-per-node=1", *allocation_flags]
        try:
            self._process = subprocess.Popen(
                [*command, "sh", "-c", 'echo "$SLURM_JOB_ID $SLURM_JOB_NODELIST"; exec cat'],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        except FileNotFoundError:
            raise ConfigError(
                "--engine slurm needs Slurm's commands (salloc, srun), which are not installed here"
            ) from None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self.job = self.nodes = ""
        try:
            words = self._process.stdout.readline().split()
            if len(words) != 2:
                errors = [line for line in self._process.stderr.read().splitlines() if "error" in line]
                raise ConfigError(
                    f"Slurm granted no job by `{shlex.join(command)}`: "
                    f"{errors[-1] if errors else 'it reported no error'}; "
                    'options such as the partition are given with --engine.allocation="--partition=gpu --time=2:00:00"'
                )
            self.job, self.nodes = words
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """End the job, or the wait for one."""
        if not self.job:
            self._process.terminate()
        try:
            self._process.communicate(timeout=START_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()


def _srun_command(job: str, node: str) -> tuple[str, ...]:
    return (
        "srun", f"--jobid={job}", "--nodes=1", "--ntasks=1", f"--nodelist={node}", "--overlap", "--unbuffered",
        "--cpu-bind=none", "--mem=0",
    )  # fmt: skip


def _address_in_slurm(node: str) -> str:
    """Return the address that Slurm has for a node."""
    facts = _run(["scontrol", "show", "node", "-o", node]).split()
    address = next((word.removeprefix("NodeAddr=") for word in facts if word.startswith("NodeAddr=")), node)
    return _resolve(address, f"Slurm's node {node}")


def _run(command: Sequence[str]) -> str:
    """Return the output of a command; raise ConfigError if it fails."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=START_TIMEOUT_S, check=False
        )
    except FileNotFoundError:
        raise ConfigError(f"{command[0]} is not installed on this machine") from None
    if done.returncode:
        raise ConfigError(f"`{shlex.join(command)}` failed: {done.stderr.strip() or done.returncode}")
    return done.stdout
