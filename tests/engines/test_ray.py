"""Cells on two simulated nodes of a real Ray cluster."""

from __future__ import annotations

import os

import psutil

from tests.engines.node_cells import DATA, SLEEP, TRAIN, host_of, pids_of, run


def test_two_nodes(kernel, cluster):
    flags = f"--engine ray --nodes 2 --cpus 2 --engine.address {cluster} --engine.lost-after-s 10"
    refused = kernel.run("%%accelerate --engine ray --nodes 2 --cpus 1 --engine.address ray://127.0.0.1:10001\n1")
    assert refused.error is not None
    assert "Ray Client is too slow" in refused.error[1]
    refused = kernel.run(f"%%accelerate --engine ray --nodes 3 --cpus 1 --engine.address {cluster}\n1", timeout_s=120)
    assert refused.error is not None
    assert "--nodes 3 was requested, and the cluster has 2" in refused.error[1]

    # The weights are those of as many workers on one machine.
    run(kernel, f"{DATA}\nmodel, optimizer, loader = make()\nfirst = [p.clone() for p in model.parameters()]")
    run(kernel, f"%%accelerate {flags} --seed 1\n{TRAIN}")
    run(kernel, "far = [p.clone() for p in model.parameters()]")
    kernel_pids = pids_of(kernel)
    assert len(kernel_pids) == 4
    assert "on 127.0.0.3" in run(kernel, "%accelerate status")

    # An interrupt keeps the processes and their values.
    interrupted = kernel.run(f"%%accelerate {flags}\nkept = 7\n{SLEEP}", timeout_s=120, interrupt_on="waiting")
    assert interrupted.error is not None
    assert interrupted.error[0] == "KeyboardInterrupt"
    assert pids_of(kernel) == kernel_pids

    # A node whose host is killed is lost; the next cell runs on the other.
    host = host_of(kernel_pids[2])
    lost = kernel.run(
        f"%%accelerate {flags}\nimport os, time\nif int(os.environ['RANK']) == 0: os.kill({host.pid}, 9)\n{SLEEP}",
        timeout_s=120,
    )
    assert lost.error is not None
    assert lost.error[0] == "WorkerDied"
    assert "node 127.0.0.3 was lost" in lost.error[1]
    assert "ranks 2 and 3 with it" in lost.error[1]
    run(kernel, f"%%accelerate {flags}\nimport torch.distributed as dist\nsize = dist.get_world_size()")
    assert kernel.value("size") == 2
    assert (
        psutil.wait_procs([psutil.Process(pid) for pid in kernel_pids[2:] if psutil.pid_exists(pid)], timeout=10)[1]
        == []
    )

    run(kernel, "model, optimizer, loader = make()\n%accelerate restart\n")
    run(kernel, f"%%accelerate --cpus 4 --seed 1\n{TRAIN}")
    assert kernel.value("all(torch.equal(a, b) for a, b in zip(far, model.parameters()))")
    assert not kernel.value("any(torch.equal(a, b) for a, b in zip(first, far))")


def test_nothing_is_left_when_the_kernel_is_killed(kernel, cluster):
    run(kernel, f"%%accelerate --engine ray --nodes 2 --cpus 1 --engine.address {cluster} --engine.lost-after-s 10\n1")
    workers = [psutil.Process(pid) for pid in pids_of(kernel)]
    ours = [*workers, *(host_of(worker.pid) for worker in workers), *(w.parent() for w in workers)]
    os.kill(kernel.pid, 9)
    assert psutil.wait_procs([process for process in ours if process is not None], timeout=20)[1] == []
