"""Cells on two nodes of a real Slurm cluster; both are this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.conftest import wait_for
from tests.engines.conftest import TOKEN
from tests.engines.machines import NODES, free_port, wait_for_port
from tests.engines.node_cells import DATA, SLEEP, TRAIN, host_of, pids_of, run
from tests.launch.cluster import is_installed, running_slurm
from tests.support.kernel import Kernel, running_kernel

pytestmark = pytest.mark.skipif(not is_installed(), reason="needs Slurm's and munge's programs, and root")
FLAGS = "--engine slurm --nodes 2 --cpus 2 --engine.lost-after-s 10"


@pytest.fixture(scope="module")
def cluster_file() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp") as place, running_slurm(Path(place)) as variables:
        yield variables["SLURM_CONF"]


@pytest.fixture
def slurm_kernel(cluster_file: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    monkeypatch.setenv("SLURM_CONF", cluster_file)
    with running_kernel() as kernel:
        output = kernel.run("%load_ext accel_nb")
        assert output.error is None, output.traceback
        yield kernel


def jobs() -> list[str]:
    return subprocess.run(["squeue", "-h", "-o", "%T"], capture_output=True, text=True, check=True).stdout.split()


def wait_for_no_job() -> None:
    subprocess.run(["timeout", "30", "sh", "-c", 'while [ -n "$(squeue -h)" ]; do :; done'], check=True)


def test_a_job_of_its_own(slurm_kernel: Kernel) -> None:
    kernel = slurm_kernel
    refused = kernel.run("%%accelerate --engine slurm --cpus 1 --engine.allocation='--partition=absent'\n1")
    assert refused.error is not None
    assert "Slurm granted no job by `salloc --nodes=1 --ntasks-per-node=1 --partition=absent`" in refused.error[1]
    assert "partition name" in refused.error[1]

    # The weights are those of as many workers on one machine.
    run(kernel, f"{DATA}\nmodel, optimizer, loader = make()")
    run(kernel, f"%%accelerate {FLAGS} --seed 1\n{TRAIN}")
    run(kernel, "far = [p.clone() for p in model.parameters()]")
    pids = pids_of(kernel)
    assert len(pids) == 4
    assert "on two" in run(kernel, "%accelerate status")
    assert jobs() == ["RUNNING"]

    interrupted = kernel.run(f"%%accelerate {FLAGS}\nkept = 7\n{SLEEP}", timeout_s=120, interrupt_on="waiting")
    assert interrupted.error is not None
    assert interrupted.error[0] == "KeyboardInterrupt"
    assert pids_of(kernel) == pids

    # A node whose step is ended is lost; the next cell runs on the other.
    agent = host_of(pids[2])
    lost = kernel.run(
        f"%%accelerate {FLAGS}\nimport os, time\nif int(os.environ['RANK']) == 0: os.kill({agent.pid}, 9)\n{SLEEP}",
        timeout_s=120,
    )
    assert lost.error is not None
    assert "node two was lost" in lost.error[1]
    run(kernel, f"%%accelerate {FLAGS}\nimport torch.distributed as dist\nsize = dist.get_world_size()")
    assert kernel.value("size") == 2

    run(kernel, "model, optimizer, loader = make()\n%accelerate restart\n")
    wait_for_no_job()
    run(kernel, f"%%accelerate --cpus 4 --seed 1\n{TRAIN}")
    assert kernel.value("all(torch.equal(a, b) for a, b in zip(far, model.parameters()))")


def test_the_job_of_the_notebook(slurm_kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook that was started inside of a job uses its nodes, and leaves the job running."""
    command = ["salloc", "--nodes=2", "--exclusive", "--no-shell"]
    granted = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    job = granted.split("job allocation ")[-1].split()[0]
    try:
        monkeypatch.setenv("SLURM_JOB_ID", job)
        monkeypatch.setenv("SLURM_JOB_NODELIST", "one,two")
        with running_kernel() as kernel:
            run(kernel, "%load_ext accel_nb")
            refused = kernel.run("%%accelerate --engine slurm --nodes 3 --cpus 1\n1")
            assert refused.error is not None
            assert f"Slurm's job {job} has 2 (one, two)" in refused.error[1]
            run(kernel, f"%%accelerate {FLAGS}\nimport torch.distributed as dist\nsize = dist.get_world_size()")
            assert kernel.value("size") == 4
        assert jobs() == ["RUNNING"]
    finally:
        subprocess.run(["scancel", job], check=True)
        wait_for_no_job()


def test_nothing_is_left_when_the_kernel_is_killed(slurm_kernel: Kernel) -> None:
    run(slurm_kernel, f"%%accelerate {FLAGS}\n1")
    workers = [psutil.Process(pid) for pid in pids_of(slurm_kernel)]
    ours = [*workers, *(host_of(worker.pid) for worker in workers), *(worker.parent() for worker in workers)]
    os.kill(slurm_kernel.pid, 9)
    assert psutil.wait_procs([process for process in ours if process is not None], timeout=20)[1] == []
    wait_for_no_job()


def test_ray_on_the_nodes_of_a_job(slurm_kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe of the documentation; here both nodes are this machine, so each is told its address."""
    kernel = slurm_kernel
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    granted = subprocess.run(
        ["salloc", "--nodes=2", "--exclusive", "--no-shell"], capture_output=True, text=True, check=True
    ).stderr
    job = granted.split("job allocation ")[-1].split()[0]
    port = free_port(NODES[0])
    head = f"{NODES[0]}:{port}"
    start = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--num-cpus=2", "--disable-usage-stats"]
    step = ["srun", f"--jobid={job}", "--nodes=1", "--ntasks=1"]
    first = [*start, "--head", f"--node-ip-address={NODES[0]}", f"--port={port}", "--include-dashboard=false"]
    commands = [
        [*step, "--nodelist=one", *first],
        [*step, "--nodelist=two", *start, f"--address={head}", f"--node-ip-address={NODES[1]}"],
    ]
    steps: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            steps.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
            wait_for_port(NODES[0], port)
        flags = f"--engine ray --nodes 2 --cpus 2 --engine.address {head} --engine.lost-after-s 10"
        with running_kernel() as kernel:
            run(kernel, "%load_ext accel_nb")
            assert wait_for(lambda: kernel.run(f"%accelerate connect {head} --nodes 2").error is None, 60)
            run(kernel, f"{DATA}\nmodel, optimizer, loader = make()")
            run(kernel, f"%%accelerate {flags} --seed 1\n{TRAIN}")
            run(kernel, "far = [p.clone() for p in model.parameters()]")
            assert f"on {NODES[1]}" in run(kernel, "%accelerate status")
            run(kernel, "model, optimizer, loader = make()\n%accelerate connect local\n")
            run(kernel, f"%%accelerate --cpus 4 --seed 1\n{TRAIN}")
            assert kernel.value("all(torch.equal(a, b) for a, b in zip(far, model.parameters()))")
    finally:
        subprocess.run(["scancel", "--signal=KILL", job], check=True)  # Ray would wait half a minute for its head
        subprocess.run(["scancel", job], check=True)
        for process in steps:
            process.wait(60)
        wait_for_no_job()
