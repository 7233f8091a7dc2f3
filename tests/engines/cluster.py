"""A Ray cluster of simulated nodes on this machine: ``python -m tests.engines.cluster``, which prints its address.

There are two nodes with processors; with ``--kernel-has-none`` the first node, which is the kernel's, is a third one
without. It ends with its standard input. On a busy machine Ray gives up a node whose agents take long to report their
ports, which no test uses: other ports are reported at once.
"""

from __future__ import annotations

import argparse
import socket
import sys
from typing import Any

import ray._raylet as raylet  # pyright: ignore[reportMissingImports]
from ray._private.node import Node  # pyright: ignore[reportMissingImports]
from ray.cluster_utils import Cluster  # pyright: ignore[reportMissingImports]

PORTS = (
    raylet.METRICS_AGENT_PORT_NAME,
    raylet.METRICS_EXPORT_PORT_NAME,
    raylet.DASHBOARD_AGENT_LISTEN_PORT_NAME,
    raylet.RUNTIME_ENV_AGENT_PORT_NAME,
)
start_processes = Node.start_ray_processes


def report_ports_and_start(node: Any) -> None:
    for name in PORTS:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            raylet.persist_port(node._session_dir, node._node_id, name, probe.getsockname()[1])
    start_processes(node)


def main() -> None:
    parser = argparse.ArgumentParser(description="Run a Ray cluster until the standard input ends.")
    parser.add_argument("--store-mb", type=int, default=100, help="size of each node's object store")
    parser.add_argument("--kernel-has-none", action="store_true", help="give the first node no processors")
    options = parser.parse_args()
    Node.start_ray_processes = report_ports_and_start
    size: dict[str, Any] = {"num_cpus": 2, "object_store_memory": options.store_mb * 1_000_000}
    first = {**size, "node_ip_address": "127.0.0.2", "include_dashboard": False}
    addresses = ["127.0.0.3"]
    if options.kernel_has_none:
        first["num_cpus"] = 0
        addresses.append("127.0.0.4")
    cluster = Cluster(initialize_head=True, head_node_args=first)
    try:
        for address in addresses:
            cluster.add_node(**size, node_ip_address=address)
        print(cluster.address, flush=True)
        sys.stdin.read()
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
