"""Several nodes on this machine: weights do not depend on them, and a node that freezes is lost for good."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.conftest import wait_for
from tests.engines.node_cells import DATA, SLEEP, TRAIN, host_of, pids_of, run
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


class Freezing:
    """The processes of a node, which are stopped as by a machine that hangs."""

    def __init__(self, host: psutil.Process) -> None:
        self.processes = [host, *host.children(recursive=True)]
        self.started_at = 0.0

    def begin(self) -> None:
        self.started_at = time.monotonic()
        for process in self.processes:
            process.send_signal(signal.SIGSTOP)

    def end(self) -> None:
        for process in self.processes:
            with suppress(psutil.NoSuchProcess):  # the kernel ends the host of a lost node on its own machine
                process.send_signal(signal.SIGCONT)

    def has_ended_all(self) -> bool:
        return not any(is_alive(process) for process in self.processes)


SAVE = """
import torch
accelerator.register_for_checkpointing(model)
for number in range(10_000):
    accelerator.save_state("saved")
    print("saving", flush=True)
"""
RETURN = """
import torch
large = torch.ones(100_000_000)
print("returning", flush=True)
"""


@pytest.mark.parametrize(
    ("code", "text"),
    [
        pytest.param(f"kept = 7\n{SLEEP}", "waiting", id="cell"),
        pytest.param(f"kept = 7\n{SAVE}", "saving", id="save"),
        pytest.param(f"kept = 7\n{RETURN}", "returning", id="return"),
        pytest.param("kept = 7", None, id="between cells"),
        pytest.param("kept = 7", "start", id="start"),
    ],
)
def test_a_node_that_freezes_is_lost_and_its_return_changes_nothing(
    kernel: Kernel, tmp_path: Path, code: str, text: str | None
) -> None:
    flags = flags_of(2)
    run(kernel, f"import os, torch\nos.chdir({str(tmp_path)!r})\nmodel = torch.nn.Linear(500, 500)")
    run(kernel, f"%%accelerate {flags}\nkept = 3")
    freezing = Freezing(host_of(pids_of(kernel)[2]))
    is_before = text in (None, "start")
    if text == "start":  # more workers are to be started
        flags = flags_of(2, 6)
    try:
        if is_before:
            freezing.begin()
        lost = kernel.run(
            f"%%accelerate {flags}\n{code}",
            timeout_s=60,
            interrupt_on=None if is_before else text,
            act=freezing.begin,
        )
        print(f"from the loss of the node to the prompt: {time.monotonic() - freezing.started_at:.2f} s")
        if text == "returning" and lost.error is None:  # the values came back before the node was frozen
            lost = kernel.run(f"%%accelerate {flags}\npass", timeout_s=60)
    finally:
        freezing.end()
    assert lost.error is not None
    assert lost.error[0] in ("WorkerDied", "PoolError")
    assert "node localhost-2 was lost: it has not answered for 2." in lost.error[1]
    # Rank 0's values come back unless no cell has run.
    assert kernel.value("kept") == (3 if text == "start" else 7)
    run(kernel, f"%%accelerate {flags}\nimport torch.distributed as dist\nsize = dist.get_world_size()")
    assert kernel.value("size") == (3 if text == "start" else 2)
    assert "lost: it has not answered for 2." in run(kernel, "%accelerate nodes")
    # Its lease ends, and with it all of its processes.
    assert wait_for(freezing.has_ended_all, 60.0)


def test_a_kernel_that_stands_still_loses_no_node(kernel: Kernel) -> None:
    flags = flags_of(2)
    process = psutil.Process(kernel.pid)
    continuing = threading.Timer(4.0, process.resume)  # longer than a node may be silent

    def pause() -> None:
        process.suspend()
        continuing.start()

    output = kernel.run(
        f"%%accelerate {flags}\n{SLEEP.replace('600', '30')}",
        timeout_s=60,
        interrupt_on="waiting",
        act=pause,
    )
    continuing.join()
    assert output.error is None, output.traceback
    assert "lost" not in run(kernel, "%accelerate nodes")


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
