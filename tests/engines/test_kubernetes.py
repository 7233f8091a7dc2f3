"""Cells in pods that a real kubectl reaches; the server of its API runs their commands on this machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.engines.node_cells import DATA, SLEEP, TRAIN, host_of, pids_of, run
from tests.support.kernel import Kernel, running_kernel

pytestmark = pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")

PODS = {"near": "Running", "far": "Running", "waiting": "Pending"}
FLAGS = "--engine kubernetes --engine.hosts near,far --nodes 2 --cpus 2"


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Start the server and yield the file that names it to kubectl."""
    command = [sys.executable, str(Path(__file__).with_name("kubernetes_api.py")), json.dumps(PODS)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        address = f"http://127.0.0.1:{server.stdout.readline().strip()}"
        path = tmp_path_factory.mktemp("kubernetes") / "config"
        path.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "test",
                    "clusters": [{"name": "test", "cluster": {"server": address}}],
                    "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
                    "users": [{"name": "test", "user": {}}],
                }
            )
        )
        yield path


@pytest.fixture
def kubernetes_kernel(settings: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    monkeypatch.setenv("KUBECONFIG", str(settings))
    with running_kernel() as kernel:
        output = kernel.run("%load_ext accel_nb")
        assert output.error is None, output.traceback
        yield kernel


def test_two_pods(kubernetes_kernel: Kernel) -> None:
    kernel = kubernetes_kernel
    for flags, problem in (
        ("--engine kubernetes --cpus 1", "the machines are not named"),
        ("--engine kubernetes --engine.hosts near --nodes 2 --cpus 1", "engine.hosts names 1"),
        ("--engine kubernetes --engine.hosts absent --cpus 1", 'pods "absent" not found'),
        ("--engine kubernetes --engine.hosts waiting --cpus 1", "pod waiting of engine.hosts is Pending"),
        ("--engine kubernetes --engine.hosts near --engine.python /absent --cpus 1", "near has no /absent"),
    ):
        refused = kernel.run(f"%%accelerate {flags}\n1", timeout_s=120)
        assert refused.error is not None
        assert problem in refused.error[1], refused.error[1]

    run(kernel, f"{DATA}\nmodel, optimizer, loader = make()")
    run(kernel, f"%%accelerate {FLAGS} --seed 1\n{TRAIN}")
    run(kernel, "far = [p.clone() for p in model.parameters()]")
    pids = pids_of(kernel)
    assert len(pids) == 4
    assert "on far" in run(kernel, "%accelerate status")

    interrupted = kernel.run(f"%%accelerate {FLAGS}\nkept = 7\n{SLEEP}", timeout_s=120, interrupt_on="waiting")
    assert interrupted.error is not None
    assert interrupted.error[0] == "KeyboardInterrupt"
    assert pids_of(kernel) == pids

    # The weights are those of as many workers on one machine.
    run(kernel, "model, optimizer, loader = make()\n%accelerate restart\n")
    run(kernel, f"%%accelerate --cpus 4 --seed 1\n{TRAIN}")
    assert kernel.value("all(torch.equal(a, b) for a, b in zip(far, model.parameters()))")


def test_nothing_is_left_when_the_kernel_is_killed(kubernetes_kernel: Kernel) -> None:
    run(kubernetes_kernel, f"%%accelerate {FLAGS}\n1")
    workers = [psutil.Process(pid) for pid in pids_of(kubernetes_kernel)]
    ours = [*workers, *(host_of(worker.pid) for worker in workers), *(worker.parent() for worker in workers)]
    os.kill(kubernetes_kernel.pid, 9)
    assert psutil.wait_procs([process for process in ours if process is not None], timeout=20)[1] == []
