"""Cells on two machines that a real ssh reaches; both are this one, by other addresses."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.engines.machines import ssh_servers
from tests.engines.node_cells import DATA, SLEEP, TRAIN, host_of, pids_of, run
from tests.support.kernel import Kernel, running_kernel

pytestmark = pytest.mark.skipif(
    shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None, reason="needs OpenSSH's server"
)


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with ssh_servers(tmp_path_factory.mktemp("ssh")) as commands:
        yield commands


@pytest.fixture
def ssh_kernel(commands: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    with running_kernel() as kernel:
        output = kernel.run("%load_ext accel_nb")
        assert output.error is None, output.traceback
        yield kernel


FLAGS = "--engine ssh --engine.hosts near,far --nodes 2 --cpus 2 "


def test_two_machines(ssh_kernel: Kernel) -> None:
    kernel = ssh_kernel
    for flags, problem in (
        ("--engine ssh --engine.hosts near --nodes 2 --cpus 1", "engine.hosts names 1"),
        ("--engine ssh --cpus 1", "the machines are not named"),
        ("--engine ssh --engine.hosts=-oProxyCommand=x --cpus 1", "names or addresses of hosts"),
        ("--engine ssh --engine.hosts nowhere.invalid --cpus 1", "nowhere.invalid of engine.hosts has no address"),
        ("--engine ssh --engine.hosts near --engine.python /absent --cpus 1", "near has no /absent"),
    ):
        refused = kernel.run(f"%%accelerate {flags}\n1", timeout_s=120)
        assert refused.error is not None
        assert problem in refused.error[1]

    # The weights are those of as many workers on one machine.
    run(kernel, f"{DATA}\nmodel, optimizer, loader = make()\nfirst = [p.clone() for p in model.parameters()]")
    run(kernel, f"%%accelerate {FLAGS} --seed 1\n{TRAIN}")
    run(kernel, "far = [p.clone() for p in model.parameters()]")
    pids = pids_of(kernel)
    assert len(pids) == 4
    assert "on far" in run(kernel, "%accelerate status")

    # Sets of words have the same order on all machines.
    run(kernel, f"%%accelerate {FLAGS}\nhashes = accelerator.gather_object([hash('word')])")
    assert kernel.value("(len(hashes), len(set(hashes)))") == (4, 1)

    interrupted = kernel.run(f"%%accelerate {FLAGS}\nkept = 7\n{SLEEP}", timeout_s=120, interrupt_on="waiting")
    assert interrupted.error is not None
    assert interrupted.error[0] == "KeyboardInterrupt"
    assert pids_of(kernel) == pids

    # A machine whose host is killed is lost; the next cell runs on the other.
    agent = host_of(pids[2])
    lost = kernel.run(
        f"%%accelerate {FLAGS}\nimport os, time\nif int(os.environ['RANK']) == 0: os.kill({agent.pid}, 9)\n{SLEEP}",
        timeout_s=120,
    )
    assert lost.error is not None
    assert lost.error[0] == "WorkerDied"
    assert "node far was lost" in lost.error[1]
    run(kernel, f"%%accelerate {FLAGS}\nimport torch.distributed as dist\nsize = dist.get_world_size()")
    assert kernel.value("size") == 2

    run(kernel, "model, optimizer, loader = make()\n%accelerate restart\n")
    run(kernel, f"%%accelerate --cpus 4 --seed 1\n{TRAIN}")
    assert kernel.value("all(torch.equal(a, b) for a, b in zip(far, model.parameters()))")
    assert not kernel.value("any(torch.equal(a, b) for a, b in zip(first, far))")


def test_nothing_is_left_when_the_kernel_is_killed(ssh_kernel: Kernel) -> None:
    run(ssh_kernel, f"%%accelerate {FLAGS}\n1")
    workers = [psutil.Process(pid) for pid in pids_of(ssh_kernel)]
    ours = [*workers, *(host_of(worker.pid) for worker in workers), *(worker.parent() for worker in workers)]
    os.kill(ssh_kernel.pid, 9)
    assert psutil.wait_procs([process for process in ours if process is not None], timeout=20)[1] == []
