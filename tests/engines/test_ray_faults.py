"""The death of parts of a Ray cluster: the kernel goes on, and so do its cells, on what remains."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest

from tests.engines.conftest import running_cluster
from tests.engines.node_cells import SLEEP, run
from tests.support.kernel import Kernel


@pytest.fixture
def cluster() -> Iterator[str]:
    """The address of a cluster that no other test uses."""
    with running_cluster() as address:
        yield address


def flags_of(cluster: str) -> str:
    return f"--engine ray --nodes 2 --cpus 1 --engine.address {cluster} --engine.lost-after-s 10"


def raylet_of(address: str) -> psutil.Process:
    """Return the raylet of a node."""
    [found] = [
        process
        for process in psutil.process_iter(["name", "cmdline"])
        if process.info["name"] == "raylet" and f"--node_ip_address={address}" in process.info["cmdline"]
    ]
    return found


def run_on_local_workers(kernel: Kernel) -> None:
    run(kernel, "kept = 3\n%accelerate restart")
    run(kernel, "%%accelerate --cpus 1\nkept = kept + 1")
    assert kernel.value("kept") == 4


def test_a_node_whose_raylet_dies_is_lost(kernel: Kernel, cluster: str) -> None:
    flags = flags_of(cluster)
    lost = kernel.run(
        f"%%accelerate {flags}\n{SLEEP}", timeout_s=120, interrupt_on="waiting", act=raylet_of("127.0.0.3").kill
    )
    assert lost.error is not None
    assert lost.error[0] == "WorkerDied"
    assert "node 127.0.0.3 was lost" in lost.error[1]
    run(kernel, f"%%accelerate {flags}\nimport torch.distributed as dist\nsize = dist.get_world_size()")
    assert kernel.value("size") == 1


def test_the_kernel_outlives_the_raylet_of_its_own_node(kernel: Kernel, cluster: str) -> None:
    lost = kernel.run(
        f"%%accelerate {flags_of(cluster)}\n{SLEEP}",
        timeout_s=120,
        interrupt_on="waiting",
        act=raylet_of("127.0.0.2").kill,
    )
    assert lost.error is not None
    assert lost.error[0] == "WorkerDied"
    run_on_local_workers(kernel)


def test_the_kernel_outlives_the_head(kernel: Kernel, cluster: str) -> None:
    run(kernel, f"%%accelerate {flags_of(cluster)}\n1")
    port = int(cluster.rpartition(":")[2])
    [head] = {
        item.pid for item in psutil.net_connections() if item.status == psutil.CONN_LISTEN and item.laddr.port == port
    }
    psutil.Process(head).kill()
    # After 60 seconds without the head Ray ends a process that has joined, if it is not told otherwise.
    assert psutil.wait_procs([psutil.Process(kernel.pid)], timeout=75)[0] == []
    run_on_local_workers(kernel)
