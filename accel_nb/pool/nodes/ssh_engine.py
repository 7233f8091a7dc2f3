"""Workers on machines that ssh reaches."""

from __future__ import annotations

from accel_nb.pool.engine import EngineRequest
from accel_nb.pool.nodes.agent_engine import Machine, named_machines, resolve_address, run_command, start_agents
from accel_nb.pool.nodes.engine import NodesEngine

CONNECT_S = 10


def start_ssh_engine(request: EngineRequest) -> NodesEngine:
    """Start an agent by ssh on each of the first hosts of the options, as many as there are nodes.

    Raise ConfigError, with the remedy, if that is not possible; nothing is left running then.
    """
    return start_agents(request, named_machines(request.options, _address_behind_ssh, _machine))


def _machine(host: str, name: str, address: str) -> Machine:
    options = ("BatchMode=yes", f"ConnectTimeout={CONNECT_S}", "ServerAliveInterval=5")
    command = ("ssh", "-T", *(word for option in options for word in ("-o", option)), "--", host)
    remedy = f"`ssh {host} true` must work without a question; keys, users and ports are read from ~/.ssh/config"
    return Machine(name, address, command, needs_quoting=True, remedy=remedy)


def _address_behind_ssh(host: str) -> str:
    """Return the address of a host, which may be an alias in ssh's configuration."""
    settings = run_command(["ssh", "-G", "--", host]).splitlines()
    name = next((line.removeprefix("hostname ") for line in settings if line.startswith("hostname ")), host)
    return resolve_address(name, f"{host} of engine.hosts")
