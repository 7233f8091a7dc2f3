"""Cells in the background: controlled, inspected, attached to, and returned between two cells."""

from __future__ import annotations

import re
from pathlib import Path

import psutil
import pytest

from accel_nb.accelerator.training.run_control import NO_MEMORY_SNAPSHOT
from accel_nb.runs import RunRegistry
from accel_nb.runs.record import read_metrics
from tests.conftest import wait_for
from tests.support.kernel import Kernel, Output, running_kernel

SETUP = """
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)
loader = DataLoader(TensorDataset(torch.arange(24.0).unsqueeze(1) / 24), batch_size=4, shuffle=True)
spare = 1
"""

LOOP = """%%accelerate --cpus 2 --background {flags}
import time
print("begins")
num_steps = spare
for epoch in range(10**9):
    for (x,) in loader:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        num_steps += 1
        time.sleep(0.02)  # a step of a larger model; nothing waits for it
    scheduler.step()
ended = True
"""


def say(kernel: Kernel, line: str) -> str:
    """Run a line magic that is to succeed; returns what it printed."""
    output = kernel.run(f"%accelerate {line}")
    assert output.error is None, output.traceback
    return output.stdout


def refused(kernel: Kernel, code: str) -> str:
    output = kernel.run(code)
    assert output.error is not None
    return output.error[1]


def wait_for_steps(kernel: Kernel) -> None:
    """Wait until the run in the background has ended a step."""
    assert wait_for(lambda: re.match(r"num_steps = ([2-9]|\d\d)", say(kernel, "inspect num_steps")), 60)


def test_a_run_is_controlled_attached_to_and_comes_back_between_two_cells(kernel: Kernel, tmp_path: Path):
    kernel.run(SETUP)
    output = kernel.run(LOOP.format(flags=f"--checkpoint {tmp_path} --name deep"))
    assert output.error is None, output.traceback
    assert "run 'deep' in the background: running" in output.texts[-1]
    wait_for_steps(kernel)

    # What is asked for happens after a step, and says which. ipykernel 6 also puts there what the run prints.
    assert re.search(r"learning rate 0\.1 -> 0\.05, after step \d+\n$", say(kernel, "set lr*=0.5"))
    assert re.search(r"learning rate 0\.05 -> 0\.02, after step \d+\n$", say(kernel, "set lr=0.02"))
    assert re.search(r"every 5 steps are reported, after step \d+\n$", say(kernel, "set log-every=5"))
    assert re.search(r"step \d+ is being saved\n$", say(kernel, "checkpoint"))
    kernel.run("session = get_ipython().magics_manager.magics['cell']['accelerate'].__self__.session")
    kernel.run(
        "from accel_nb.telemetry.actions import TakeMemorySnapshot\n"
        "request = session.last_run.controls.request(TakeMemorySnapshot())"
    )
    assert kernel.value("(request.wait(20), request.text)") == (True, NO_MEMORY_SNAPSHOT)
    looked = say(kernel, "inspect num_steps model nothing").splitlines()
    assert int(looked[0].removeprefix("num_steps = ")) > 1
    assert looked[1:] == ["model = Linear with 2 parameters", "nothing = (no such name in the cell)"]

    # What would disturb it is refused with the way out; the notebook has its own values until it has ended.
    assert "`%accelerate stop --after-step`" in refused(kernel, "%%accelerate --cpus 2\n1")
    assert "`%accelerate inspect NAMES`" in refused(kernel, "%accelerate pull model")
    assert "lr=RATE" in refused(kernel, "%accelerate set rate=1")
    assert "run 'deep' in the background: running" in say(kernel, "status")
    assert kernel.value("('num_steps' in globals(), scheduler.last_epoch)") == (False, 0)

    attached = kernel.run("%accelerate attach")
    assert attached.error is None, attached.traceback
    assert attached.stdout.startswith("begins\n")
    assert "2 workers on cpu" in attached.receipt
    assert any("application/vnd.jupyter.widget-view+json" in data for data in attached.displays)

    kernel.run("kept, before = model, model.weight.item(); model = spare = None")
    assert re.search(r"stopped after step \d+: step \d+ is being saved\n$", say(kernel, "stop --after-step"))
    output = kernel.run("%accelerate wait")
    assert output.error is None, output.traceback
    assert "done" in output.stdout
    reported = kernel.run("%accelerate attach")
    assert any(re.match(r"stopped after step [\d,]+, as requested", text) for text in reported.texts)
    assert any(text.startswith("saved step") for text in reported.texts)
    state = "(model is kept, model.weight.item() != before, spare, 'ended' in globals(), num_steps > 5)"
    assert kernel.value(state) == (True, True, None, False, True)
    rates = kernel.value("(optimizer.param_groups[0]['lr'], scheduler.base_lrs[0])")
    assert rates == pytest.approx((0.02, 0.02))
    assert len(list(tmp_path.glob("step_*"))) == 2
    run = RunRegistry().find("deep")
    assert (run.outcome, len(run.checkpoints), run.config["background"][0]) == ("done", 2, True)
    assert read_metrics(RunRegistry().folder / run.id)
    # After the first of its epochs, of six steps, the plan of its schedule was drawn, ten epochs ahead.
    plan = "session.last_run.output.panel_state.tables['plan', 0, '0'].columns"
    assert kernel.value(f"(list({plan}[0][:4]), len({plan}[0]))") == ([1, 6, 7, 12], 22)
    assert kernel.value("session.earlier_runs.others(0)[0].title") == "deep"
    # Replicas took the same steps: another cell trains on from them, and finds them equal.
    code = "import torch\nheld = accelerator.gather(model.weight.detach()).flatten().tolist()"
    output = kernel.run(f"%%accelerate --cpus 2\n{code}")
    assert output.error is None, output.traceback
    assert kernel.value("held[0] == held[1] == model.weight.item()")


def test_names_come_back_with_the_next_cell_also_after_an_error_or_an_interrupt(kernel: Kernel):
    kernel.run(SETUP)
    output = kernel.run("%%accelerate --cpus 2 --background\nfound = [1, 2]\nraise ValueError('no more')")
    assert output.error is None, output.traceback
    assert refused(kernel, "%accelerate wait") == "no more"
    assert kernel.value("found") == [1, 2]
    kernel.run(LOOP.format(flags="--no-panel"))
    wait_for_steps(kernel)
    say(kernel, "interrupt")
    assert "interrupted" in say(kernel, "wait")
    assert kernel.value("num_steps > 1")
    kernel.run("%%accelerate --cpus 2 --background\nfound = 'anew'")
    arrived: list[Output] = []

    def is_back() -> bool:
        arrived.append(kernel.run("1"))
        return "back from 'cell" in arrived[-1].stdout

    assert wait_for(is_back, 20)
    assert kernel.value("found") == "anew"
    assert "no cell runs in the background" in refused(kernel, "%accelerate interrupt")


def test_what_the_notebook_deletes_after_a_run_is_freed(kernel: Kernel):
    kernel.run("import torch, weakref\nlarge = torch.zeros(10)\nreference = weakref.ref(large)")
    output = kernel.run("%%accelerate --cpus 2 --background\nlarge += 1")
    assert output.error is None, output.traceback
    say(kernel, "wait")
    assert kernel.value("large.sum().item()") == 10
    kernel.run("del large")
    assert kernel.value("reference() is None") is True


@pytest.mark.nightly
def test_a_kernel_that_ends_takes_its_background_run_along():
    with running_kernel() as kernel:
        kernel.run("%load_ext accel_nb")
        kernel.run(SETUP)
        kernel.run(LOOP.format(flags=""))
        wait_for_steps(kernel)
        children = psutil.Process(kernel.pid).children(recursive=True)
        assert len(children) >= 3
    assert not _left(children)


def test_a_kernel_that_is_reported_to_end_lets_its_background_run_save_first(tmp_path: Path):
    with running_kernel() as kernel:
        kernel.run("%load_ext accel_nb")
        kernel.run(SETUP)
        kernel.run(LOOP.format(flags=f"--checkpoint {tmp_path}"))
        wait_for_steps(kernel)
        process = psutil.Process(kernel.pid)
        children = process.children(recursive=True)
        process.terminate()
        assert wait_for(lambda: not kernel.manager.is_alive(), 30)
        assert not _left(children)
    assert [(path / "manifest.json").exists() for path in tmp_path.glob("step_*")] == [True]


def _left(processes: list[psutil.Process]) -> list[psutil.Process]:
    _, alive = psutil.wait_procs(processes, timeout=20)
    return [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
