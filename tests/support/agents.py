"""An engine with two simulated nodes: two agents on this machine, whose frames travel over pipes."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from accel_nb.pool.nodes.agent import AgentLink
from accel_nb.pool.nodes.engine import NodesEngine
from accel_nb.pool.nodes.host import HostSettings

LOOPBACK = "127.0.0.1"


def two_agents(
    program: str,
    preload: Sequence[str],
    *,
    lost_after_s: float = 10.0,
    lease_s: float = 10.0,
    is_local: bool = False,
) -> NodesEngine:
    settings = [
        HostSettings(program, tuple(preload), node, LOOPBACK, LOOPBACK, lease_s, is_local=is_local) for node in range(2)
    ]
    links = [AgentLink(name, [sys.executable], own) for name, own in zip(("near", "far"), settings, strict=True)]
    return NodesEngine(links, lost_after_s=lost_after_s)
