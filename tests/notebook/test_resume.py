"""Cells that save by themselves and go on from where they were, without an edit."""

from __future__ import annotations

import os
import re
import shutil
import signal
from pathlib import Path

import pytest

from tests.conftest import wait_for
from tests.notebook.cells import done, run
from tests.support.kernel import running_kernel

SETUP = """
import torch
from torch.utils.data import DataLoader, TensorDataset

def build():
    global model, optimizer, scheduler, loader
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    loader = DataLoader(TensorDataset(torch.arange(24.0).unsqueeze(1) / 24), batch_size=4, shuffle=True)

def weights():
    return [value.tolist() for value in model.state_dict().values()]

build()
"""

LOOP = """
sizes = []
for epoch in range(3):
    sizes.append(0)
    for (x,) in loader:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        sizes[-1] += 1
    scheduler.step()
    noise = torch.rand(())  # code between loops that draws: a resumed run must not feel it
"""

EXPLICIT = """
model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
sizes = []
for epoch in range(3):
    sizes.append(0)
    for (x,) in loader:
        accelerator.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        sizes[-1] += 1
    scheduler.step()
"""


@pytest.fixture
def folder(kernel, tmp_path: Path) -> Path:
    output = kernel.run(SETUP)
    assert output.error is None, output.traceback
    return tmp_path / "runs"


def dying(loop: str, mark: Path) -> str:
    """Return a loop in whose second epoch rank 1 dies, once."""
    death = f"""
        if (epoch, sizes[-1], os.environ['RANK']) == (1, 2, '1') and not os.path.exists({str(mark)!r}):
            open({str(mark)!r}, 'w').close()
            os._exit(7)
"""
    return "import os\n" + loop.replace("        sizes[-1] += 1\n", "        sizes[-1] += 1" + death)


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in folder.glob("step_*") if path.name[5:].isdigit())


def test_a_cell_whose_worker_dies_goes_on_by_itself(kernel, folder: Path, tmp_path: Path):
    done(kernel, LOOP, "--cpus 2 --divide data")  # a cell that reads its rank, as the other does, reads shares
    whole = kernel.value("weights()")
    kernel.run("build()")
    flags = f"--cpus 2 --checkpoint {folder} --every 2 --max-restarts 2"
    output = done(kernel, dying(LOOP, tmp_path / "died"), flags)
    assert "exited with code 7" in output.stderr
    assert re.search(rf"restarting from the newest checkpoint, {folder}/step_\d+; 1 left", output.stderr)
    assert any("resumed step " in text for text in output.texts)
    assert kernel.value("weights()") == whole
    output = run(kernel, "raise ValueError('always')", "--cpus 2 --max-restarts 1")
    assert output.error == ("ValueError", "always")
    assert output.stderr.count("restarting from the start") == 1


def failing(loop: str, mark: Path, step: int) -> str:
    """Return a loop that raises at the start of a step, once, when its checkpoints are complete."""
    error = f"""
        if sum(sizes) == {step} and not os.path.exists({str(mark)!r}):
            accelerator.wait_for_checkpoint()
            accelerator.wait_for_everyone()
            open({str(mark)!r}, 'w').close()
            raise TimeoutError('once')
"""
    return "import os\n" + loop.replace("        sizes[-1] += 1\n", "        sizes[-1] += 1" + error)


def test_a_restart_before_the_first_save_resumes_as_the_run_did(kernel, folder: Path, tmp_path: Path):
    done(kernel, EXPLICIT, f"--cpus 2 --checkpoint {folder} --every 2")
    whole = kernel.value("weights()")
    keep_until(folder, 4)
    kernel.run("build()")
    new = tmp_path / "new"
    flags = f"--cpus 2 --checkpoint {new} --every 2 --resume {folder} --max-restarts 1"
    output = done(kernel, failing(EXPLICIT, tmp_path / "failed", 1), flags)
    assert f"restarting from {folder}: this run has saved no checkpoint in {new} yet; 0 left" in output.stderr
    assert any(f"resumed step 4 from {folder}/step_4" in text for text in output.texts)
    assert (kernel.value("sizes"), steps(new)) == ([0, 2, 3], [6, 8])
    assert kernel.value("weights()") == whole


@pytest.mark.parametrize("step", [1, 3])
def test_a_restart_does_not_load_checkpoints_of_an_earlier_run(kernel, folder: Path, tmp_path: Path, step: int):
    done(kernel, EXPLICIT, f"--cpus 2 --checkpoint {folder} --every 5")
    whole = kernel.value("weights()")
    kernel.run("build()")
    kernel.run("%accelerate stop")
    flags = f"--cpus 2 --checkpoint {folder} --every 2 --max-restarts 1"
    output = done(kernel, failing(EXPLICIT, tmp_path / "failed", step), flags)
    where = "the start: this run has saved no" if step == 1 else f"the newest checkpoint, {folder}/step_2;"
    assert f"restarting from {where}" in output.stderr
    assert kernel.value("sizes") == ([3, 3, 3] if step == 1 else [1, 3, 3])
    assert kernel.value("weights()") == whole


def keep_until(folder: Path, step: int) -> None:
    for path in folder.glob("step_*"):
        if int(path.name[5:]) > step:
            shutil.rmtree(path)


@pytest.mark.parametrize(("loop", "num_steps"), [(LOOP, 18), (EXPLICIT, 9)], ids=["plain", "explicit"])
def test_a_cell_that_is_run_again_goes_on_to_the_bit(kernel, folder: Path, loop: str, num_steps: int):
    per_epoch = num_steps // 3
    output = done(kernel, loop, f"--cpus 2 --checkpoint {folder} --every 2")
    assert steps(folder) == list(range(2, num_steps + 1, 2))
    assert any("saved step 2, 4, " in text for text in output.texts)
    whole = kernel.value("(weights(), scheduler.last_epoch)")
    step = per_epoch + 2 - per_epoch % 2  # in the middle of the second epoch
    keep_until(folder, step)
    kernel.run("build()")
    output = done(kernel, loop, f"--cpus 2 --checkpoint {folder} --every 2 --resume auto")
    assert kernel.value("sizes") == [0, 2 * per_epoch - step, per_epoch]
    assert kernel.value("(weights(), scheduler.last_epoch)") == whole
    (line,) = [text for text in output.texts if text.startswith("resumed")]
    left = (2 * per_epoch - step) * 24 // per_epoch
    assert f"resumed step {step} from {folder}/step_{step} · epoch 2, {left} samples left · 2 workers as before" in line
    assert "exact to the bit" in line


def test_the_rest_is_trained_on_another_number_of_workers(kernel, folder: Path):
    done(kernel, LOOP, f"--cpus 2 --checkpoint {folder} --every 4")
    keep_until(folder, 8)
    kernel.run("build()")
    output = done(kernel, LOOP, f"--cpus 1 --resume {folder}/step_8")
    assert kernel.value("(sizes, scheduler.last_epoch)") == ([0, 4, 6], 3)
    assert any("2 -> 1 workers" in text for text in output.texts)


def test_nothing_to_resume_is_said(kernel, folder: Path):
    output = done(kernel, LOOP, f"--cpus 2 --checkpoint {folder} --resume auto")
    assert kernel.value("sizes") == [6, 6, 6]
    assert any(text.startswith("started from the beginning") for text in output.texts)
    kernel.run("build()")
    assert run(kernel, LOOP, f"--cpus 2 --resume {folder}/step_3").error[0] == "NoCheckpoint"


def test_a_cell_without_a_loader_says_that_nothing_was_resumed(kernel, folder: Path):
    output = done(kernel, "print(1)", f"--cpus 2 --checkpoint {folder} --resume auto")
    assert any("--resume auto had no effect" in text for text in output.texts)


def test_epochs_are_counted_from_the_start_of_a_cell(kernel, folder: Path):
    done(kernel, LOOP, f"--cpus 2 --checkpoint {folder} --every 4")
    done(kernel, LOOP, f"--cpus 2 --checkpoint {folder} --every 4")
    keep_until(folder, 28)
    done(kernel, LOOP, f"--cpus 2 --checkpoint {folder} --every 4 --resume auto")
    assert kernel.value("sizes") == [0, 2, 6]


def test_a_loop_without_a_loader_says_that_nothing_is_saved(kernel, folder: Path):
    body = "for _ in range(3):\n    model(torch.ones(4, 1)).mean().backward()\n    optimizer.step()\n"
    output = done(kernel, body, f"--cpus 2 --checkpoint {folder} --every 1")
    assert any("--every had no effect" in text for text in output.texts)


def test_a_worker_that_is_to_end_saves_first(kernel, folder: Path):
    """As where a machine is taken away: every process gets SIGTERM and some time."""
    body = (
        "import os, signal\nfrom pathlib import Path\n"
        "if accelerator.process_index == 1:\n    os.kill(os.getpid(), signal.SIGTERM)\n"
        "accelerator.prepare(model, optimizer, loader)\n"
        "for epoch in range(20_000):\n"
        "    for (x,) in loader:\n"
        "        accelerator.backward(model(x).square().mean())\n"
        "        optimizer.step()\n        optimizer.zero_grad()\n"
        f"    is_saved = torch.tensor(float(any(Path({str(folder)!r}).glob('step_*/manifest.json'))))\n"
        "    if accelerator.reduce(is_saved, 'sum') > 0: break\n"
    )
    done(kernel, body, f"--cpus 2 --checkpoint {folder} --every 1000000")
    assert len(steps(folder)) == 1


LONG = """
sizes = []
for epoch in range(200):
    sizes.append(0)
    for (x,) in loader:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        sizes[-1] += 1
        if epoch == 2: print("go", flush=True)
    scheduler.step()
"""


def test_an_interrupt_saves_the_step_and_keeps_the_workers(kernel, folder: Path):
    done(kernel, LONG, "--cpus 2")
    whole = kernel.value("weights()")
    kernel.run("build()")
    output = run(kernel, LONG, f"--cpus 2 --checkpoint {folder}", interrupt_on="go")
    assert output.error is not None
    assert output.error[0] == "KeyboardInterrupt"
    (step,) = steps(folder)
    assert kernel.value("sum(sizes)") == step, "the notebook holds what was saved"
    assert any(text.startswith(f"saved step {step} (1) in {folder}") for text in output.texts)
    assert any(text.startswith(f"stopped after step {step}: --resume auto") for text in output.texts)
    kernel.run("build()")
    done(kernel, LONG, f"--cpus 2 --checkpoint {folder} --resume auto")
    assert kernel.value("sum(sizes)") == 1200 - step
    assert kernel.value("weights()") == whole


def test_an_interrupt_far_from_the_end_of_a_step_says_that_nothing_was_saved(kernel, folder: Path):
    body = (
        f"import threading\n{LOOP}\nthreading.Event().wait(1.5)\nprint('go', flush=True)\nthreading.Event().wait(100)\n"
    )
    output = run(kernel, body, f"--cpus 2 --checkpoint {folder} --every 4", interrupt_on="go")
    assert output.error is not None
    assert output.error[0] == "KeyboardInterrupt"
    assert any(text.startswith("not saved at the interrupt") for text in output.texts)


@pytest.mark.nightly
def test_a_kernel_that_is_to_end_saves_first(tmp_path: Path):
    """As where a session's time is up: the kernel gets SIGTERM while a cell runs."""
    folder = tmp_path / "runs"
    with running_kernel() as kernel:
        assert kernel.run("%load_ext accel_nb").error is None
        assert kernel.run(SETUP).error is None
        pid = kernel.pid
        body = LONG.replace("range(200)", "range(10**9)")
        kernel.client.execute(f"%%accelerate --cpus 2 --checkpoint {folder}\n{body}")
        text = ""
        while "go" not in text:
            message = kernel.client.get_iopub_msg(timeout=60)
            if message["msg_type"] == "stream":
                text += message["content"]["text"]
        os.kill(pid, signal.SIGTERM)
        process = kernel.manager.provisioner.process
        assert wait_for(lambda: process.poll() is not None, 30)
        assert process.returncode == -signal.SIGTERM
    assert len(steps(folder)) == 1
    assert list(folder.glob("step_*/manifest.json"))


def test_a_rank_that_is_killed_in_a_save_leaves_the_checkpoint_before(kernel, folder: Path):
    """Rank 1 dies as it writes its part of step 8: it is never committed, and the next cell's saves work."""
    body = (
        "def change_writes():\n"
        "    import os, signal\n"
        "    from accel_nb.checkpoint.store import LocalStore\n"
        "    write = LocalStore.write\n"
        "    def dying(self, folder, file, content):\n"
        "        if folder.startswith('step_8.') and os.environ['RANK'] == '1':\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
        "        write(self, folder, file, content)\n"
        "    LocalStore.write = dying\n"
        "change_writes()\n" + LOOP
    )
    output = run(kernel, body, f"--cpus 2 --checkpoint {folder} --every 4")
    assert output.error is not None
    assert output.error[0] == "WorkerDied"
    assert "rank 1" in output.error[1]
    assert steps(folder) == [4]
    kernel.run("build()")
    output = done(kernel, LOOP, f"--cpus 2 --checkpoint {folder} --every 4 --resume auto")
    assert any(text.startswith("resumed step 4 from") for text in output.texts)
    assert steps(folder) == [4, 8, 12, 16]
    assert not list(folder.glob("*.tmp-*"))
