"""Workers in pods that kubectl reaches."""

from __future__ import annotations

from accel_nb.errors import ConfigError
from accel_nb.pool.engine import EngineRequest
from accel_nb.pool.nodes.agent_engine import Machine, named_machines, run_command, start_agents
from accel_nb.pool.nodes.engine import NodesEngine


def start_kubernetes_engine(request: EngineRequest) -> NodesEngine:
    """Start an agent by ``kubectl exec`` in each of the first pods of the options, as many as there are nodes.

    Raise ConfigError, with the remedy, if that is not possible; nothing is left running then.
    """
    return start_agents(request, named_machines(request.options, _address_of, _machine))


def _machine(pod: str, name: str, address: str) -> Machine:
    return Machine(name, address, ("kubectl", "exec", "--stdin", "--quiet", pod, "--"))


def _address_of(pod: str) -> str:
    """Return the address of a running pod in the namespace that kubectl is set to."""
    phase, _, address = run_command(
        ["kubectl", "get", "pod", pod, "--output", "jsonpath={.status.phase} {.status.podIP}"]
    ).partition(" ")
    if phase != "Running" or not address:
        raise ConfigError(f"pod {pod} of engine.hosts is {phase or 'unknown'}, and not Running")
    return address
