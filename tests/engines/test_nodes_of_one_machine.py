"""Several nodes on this machine: weights do not depend on them, and a node that freezes is lost for good."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

from tests.conftest import wait_for
from tests.engines.test_ray import DATA, SLEEP, TRAIN, host_of, pids_of, run
from tests.support.kernel import Kernel, running_kernel

DISTANCE = "max((a - b).abs().max().item() for a, b in zip(local, model.parameters(), strict=True))"


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    with running_kernel() as kernel:
        output = kernel.run("%load_ext accel_nb")
        assert output.error is None, output.traceback
        yield kernel


def flags_of(num_nodes: int, num_workers: int = 4) -> str:
    hosts = ",".join(["localhost"] * num_nodes)
    return f"--engine ssh --engine.hosts {hosts} --nodes {num_nodes} --cpus {num_workers // num_nodes}"


@pytest.mark.parametrize("options", ["--strategy ddp --accumulate 2", "--strategy fsdp"])
def test_weights_are_equal_to_the_bit_on_one_two_and_four_nodes(kernel: Kernel, options: str) -> None:
    run(kernel, f"{DATA}\nmodel, optimizer, loader = make()")
    run(kernel, f"%%accelerate --cpus 4 {options} --seed 1\n{TRAIN}")
    run(kernel, "local = [p.detach().clone() for p in model.parameters()]")
    for num_nodes in (2, 4):
        run(kernel, f"{DATA}\nmodel, optimizer, loader = make()")
        run(kernel, f"%%accelerate {flags_of(num_nodes)} {options} --seed 1\n{TRAIN}")
        assert kernel.value(DISTANCE) == 0.0, num_nodes


def test_a_node_that_freezes_is_lost_and_its_return_changes_nothing(kernel: Kernel) -> None:
    flags = flags_of(2)
    run(kernel, f"%%accelerate {flags}\nkept = 3")
    ranks = pids_of(kernel)
    host = host_of(ranks[2])
    frozen = [host, *host.children(recursive=True)]
    frozen_at = 0.0

    def freeze() -> None:
        nonlocal frozen_at
        frozen_at = time.monotonic()
        for process in frozen:
            process.send_signal(signal.SIGSTOP)

    timer = threading.Timer(1.0, freeze)
    timer.start()
    try:
        lost = kernel.run(f"%%accelerate {flags}\nkept = 7\n{SLEEP}", timeout_s=60)
        print(f"from the loss of the node to the prompt: {time.monotonic() - frozen_at:.2f} s")
    finally:
        timer.join()
        for process in frozen:
            process.send_signal(signal.SIGCONT)
    assert lost.error is not None
    assert lost.error[0] == "WorkerDied"
    assert "node localhost-2 was lost: it has not answered for 2." in lost.error[1]
    assert kernel.value("kept") == 7
    run(kernel, f"%%accelerate {flags}\nimport torch.distributed as dist\nsize = dist.get_world_size()")
    assert kernel.value("size") == 2
    assert "lost: it has not answered for 2." in run(kernel, "%accelerate nodes")
    # Its lease ends, and with it all of its processes.
    assert wait_for(lambda: not any(is_alive(process) for process in frozen), 60.0)


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
