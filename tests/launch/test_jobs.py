"""Jobs that really start: scripts on ranks of this machine, notebooks, two simulated machines, interrupts, deaths."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import nbformat
import psutil
import pytest
import torch

from accel_nb.cli.main import main
from accel_nb.launch.rank_task import RankTask
from accel_nb.pool.control.stop_escalation import GRACE_S
from tests.conftest import wait_for
from tests.launch.jobs import TIMEOUT_S, launch, runs, script, start, start_torchrun, write_digits

TELL = """
    import json, os, sys
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "CUDA_VISIBLE_DEVICES")
    print("from", os.environ["RANK"], flush=True)
    with open(f"rank{os.environ['RANK']}.json", "w") as file:
        json.dump([sys.argv, __name__, {name: os.environ[name] for name in names}, sys.path[0]], file)
    forever = __import__("threading").Event()
    if os.environ["RANK"] == "1":
        def deep():
            raise ValueError(sys.argv[1])
        while not os.path.exists("rank0.json") or not os.path.getsize("rank0.json"):
            forever.wait(0.01)  # the job ends rank 0 as soon as this one has failed
        deep()
    sys.stdin.read()
    forever.wait()
"""


def test_ranks_get_place_and_words_and_the_first_that_fails_is_named(folder: Path):
    words = ["a b", "--cpus", "7", "$(touch evil)"]
    code, out, err = launch("--cpus", "2", "--name", "try", script(folder / "tell.py", TELL), *words)
    assert code == 1
    assert out == "from 0\n"
    assert [path.read_text() for path in (folder / "state").rglob("rank1.log")] == ["from 1\n"]
    assert "rank 1 of 2 raised:\nTraceback" in err
    assert 'tell.py", line 10, in deep' in err
    assert err.rstrip().endswith("ValueError: a b")
    assert "runpy" not in err
    for rank in (0, 1):
        argv, name, variables, path = json.loads((folder / f"rank{rank}.json").read_text())
        assert (argv, name, path) == (["tell.py", *words], "__main__", str(folder))
        assert list(variables.values()) == [str(rank), "2", str(rank), "2", "127.0.0.1", ""]
    assert not (folder / "evil").exists()
    (run,) = runs(folder)
    assert (run.name, run.outcome, run.exit_code, run.args) == ("try", "failed", 1, tuple(words))
    assert run.config["cpus"] == (2, "--cpus 2 (flags)")
    assert "ValueError" in run.error


@pytest.mark.parametrize("has_agent", [False, True])
def test_an_error_whose_text_raises_is_reported(folder: Path, has_agent: bool, monkeypatch):
    raising = """
        class Bad(Exception):
            def __str__(self):
                return 1 / 0
        raise Bad
    """
    report = folder / "report.json"
    if has_agent:
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(report))
    with report.open("w") as file:
        number = None if has_agent else file.fileno()
        task = RankTask("script", str(script(folder / "raises.py", raising)), report_file=number)
        command = task.command(sys.executable, [])
        ended = subprocess.run(command, pass_fds=[file.fileno()], stderr=subprocess.PIPE, text=True, timeout=TIMEOUT_S)
    assert ended.returncode == 1
    message = json.loads(report.read_text())["message"]
    assert "<exception str() failed>" in (message["message"] if has_agent else message), ended.stderr


WITH_ACCELERATE = """
    import json, os, torch
    from accelerate import Accelerator
    accelerator = Accelerator()
    place = [accelerator.num_processes, accelerator.process_index, accelerator.device.type]
    found = accelerator.gather(torch.tensor([accelerator.process_index])).tolist()
    with open(f"rank{os.environ['RANK']}.json", "w") as file:
        json.dump([place, found], file)
"""


def test_a_script_that_imports_accelerate_itself_trains_on_all_ranks(folder: Path):
    pytest.importorskip("accelerate")
    code, _, err = launch("--cpus", "2", script(folder / "train.py", WITH_ACCELERATE))
    assert code == 0, err
    for rank in (0, 1):
        assert json.loads((folder / f"rank{rank}.json").read_text()) == [[2, rank, "cpu"], [0, 1]]


def test_exit_codes_and_deaths_are_the_jobs(folder: Path):
    code, _, err = launch("--cpus", "1", script(folder / "three.py", "import sys; sys.exit(3)"))
    assert (code, err) == (3, "the job exited with code 3\n")
    die = """
        import os, signal
        print("last words", flush=True)
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGSEGV)
        __import__("threading").Event().wait()
    """
    code, _, err = launch("--cpus", "2", script(folder / "die.py", die))
    assert code == 128 + signal.SIGSEGV
    assert "rank 1 of 2 was ended by SIGSEGV" in err
    assert "last words" in err


WAIT = """
    import os
    try:
        os.write(1, f"{os.getpid()}\\n".encode())
        __import__("threading").Event().wait()
    finally:
        os.write(1, b"cleaned up\\n")  # whole: print() writes a line in two parts where PYTHONUNBUFFERED is set
"""


def test_an_interrupt_reaches_the_ranks_and_a_killed_launcher_leaves_none(folder: Path):
    name = script(folder / "wait.py", WAIT)
    with start("--cpus", "2", "--show-ranks", "all", name) as process:
        assert process.stdout is not None
        for _ in range(2):
            process.stdout.readline()
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 128 + signal.SIGINT
    assert out == "cleaned up\n" * 2
    assert runs(folder)[0].outcome == "interrupted"
    with start("--cpus", "2", "--show-ranks", "all", name) as process:
        assert process.stdout is not None
        pids = [int(process.stdout.readline()) for _ in range(2)]
        process.kill()
        process.communicate(timeout=TIMEOUT_S)
    assert wait_for(lambda: not any(map(psutil.pid_exists, pids)))


HANDLE = f"""
    import threading
    forever = threading.Event()
    try:
        print("go", flush=True)
        forever.wait()
    except KeyboardInterrupt:
        forever.wait({GRACE_S + 0.5})
        print("saved", flush=True)
"""


def test_a_script_that_handles_an_interrupt_may_take_long(folder: Path):
    with start("--cpus", "1", script(folder / "handle.py", HANDLE)) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=TIMEOUT_S)
    assert (out, process.returncode) == ("saved\n", 128 + signal.SIGINT)


FORK = """
    import multiprocessing, sys, threading
    child = multiprocessing.get_context("fork").Process(target=threading.Event().wait)
    child.start()
    child.terminate()
    child.join()
    sys.exit(child.exitcode + 100)
"""


def test_a_process_that_a_script_forks_is_terminated_as_ever(folder: Path):
    code, _, err = launch("--cpus", "1", script(folder / "fork.py", FORK))
    assert (code, err) == (100 - signal.SIGTERM, f"the job exited with code {100 - signal.SIGTERM}\n")


WAITING_CELLS = [
    """\
import logging, sys, threading
from IPython.display import display
logging.basicConfig(level=logging.INFO)
shown = display({"text/html": "a"}, raw=True, display_id=True)
""",
    """\
shown.update({"text/html": "b"}, raw=True)
logging.info("one")
sys.stdout.writelines(["two\\n"])
threading.Event().wait()
""",
    "print('not run')",
]


def test_an_interrupted_notebook_is_written_with_its_outputs_until_then(folder: Path):
    cells = [nbformat.v4.new_code_cell(text) for text in WAITING_CELLS]
    cells[1].metadata["tags"] = ["raises-exception"]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), folder / "wait.ipynb")
    with start("--cpus", "1", "--out", "ran.ipynb", "wait.ipynb") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "two\n"
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, out) == (128 + signal.SIGINT, "")
    first, second, third = nbformat.read(folder / "ran.ipynb", as_version=4).cells
    assert [output.data for output in first.outputs] == [{"text/html": "b"}]
    assert third.outputs == []
    logged, printed, error = second.outputs
    assert (logged.text, printed.text, error.ename) == ("INFO:root:one\n", "two\n", "KeyboardInterrupt")


def test_a_rank_that_mpi_has_started_takes_its_place(folder: Path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    place = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    tell = "import os; print(os.environ['RANK'], os.environ['LOCAL_RANK'], os.environ['MASTER_PORT'], os.getpid())"
    variables = {**os.environ, **place, "OMPI_COMM_WORLD_LOCAL_RANK": "1", "MASTER_PORT": port}
    with start("--cpus", "2", script(folder / "tell.py", tell), env=variables) as process:
        out, err = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, err) == (0, "")
    assert out.split() == ["1", "1", port, str(process.pid)]  # the very process that the scheduler watches


TRAIN = """
    import os, sys, torch
    from accel_nb import Accelerator

    accelerator = Accelerator(seed=0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.utils.data.TensorDataset(torch.ones(32, 4))
    model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=4))
    is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    num_steps = 0
    for epoch in range(int(sys.argv[1])):
        for (x,) in loader:
            accelerator.backward(model(x).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
            num_steps += 1
            accelerator.log({"epoch": epoch})
            if num_steps == 6 and is_first:
                accelerator.wait_for_checkpoint()
                if sys.argv[2] == "fail" and accelerator.process_index == 1:
                    raise RuntimeError("halfway")
                accelerator.print("halfway", flush=True)
"""


@pytest.mark.timeout(300)
def test_sigterm_saves_then_stops(folder: Path):
    name = script(folder / "train.py", TRAIN)
    with start("--cpus", "2", "--checkpoint", "saved", name, "1000000", "go on") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "halfway\n"
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 128 + signal.SIGTERM
    assert "--resume auto continues from there" in err
    assert list((folder / "saved").glob("step_*"))
    assert [run.outcome for run in runs(folder)] == ["interrupted"]


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_a_restart_goes_on_from_the_last_checkpoint(folder: Path):
    name = script(folder / "train.py", TRAIN)
    flags = ["--cpus", "2", "--checkpoint", "again", "--every", "2", "--max-restarts", "1"]
    code, _, err = launch(*flags, name, "3", "fail")
    assert code == 0, err
    for line in ("rank 1 of 2 raised:", "RuntimeError: halfway", "restart 1 of 1", "resumed step "):
        assert line in err
    [done] = runs(folder)
    assert done.outcome == "done"
    assert done.metrics == {"epoch": 2.0}
    assert any("again/step_" in url for url in done.checkpoints)


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_notebook_script_and_two_machines_train_the_same_weights(folder: Path, monkeypatch: pytest.MonkeyPatch):
    write_digits(folder)
    code, out, err = launch("--cpus", "2", "--out", "ran.ipynb", "digits.ipynb", "notebook.pt")
    assert code == 0, err
    assert "2 workers on cpu" in out  # the command line's count, not the cell's
    ran = nbformat.read(folder / "ran.ipynb", as_version=4)
    assert any(str(item.get("text")).startswith("trained\n") for item in ran.cells[2].outputs)
    assert ran.cells[3].outputs[0].data["text/plain"] == "15"
    assert main(["export", "digits.ipynb", "digits.py"]) == 0
    cell, job = sorted(runs(folder), key=lambda run: run.kind)
    assert (cell.kind, cell.outcome, cell.num_steps, job.kind, job.outcome) == ("cell", "done", 30, "launch", "done")
    by_file, by_magic = (
        (folder / f"{name}.py").read_text().partition("\nimport sys")[2].replace(f"{name}.yaml", "FILE")
        for name in ("digits", "again")
    )
    assert by_file == by_magic != ""
    code, out, err = launch("--cpus", "2", "digits.py", "script.pt")
    assert code == 0, err
    assert out == "trained\n"
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as the ranks before had: sums of more threads round otherwise
    for name, begin in (("machines", start), ("torchrun", start_torchrun)):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            place = ["--nnodes", "2", "--rdzv-id", "job", "--rdzv-endpoint", f"127.0.0.1:{probe.getsockname()[1]}"]
        workers = ["--cpus", "1"] if begin is start else ["--rdzv-backend", "c10d"]
        machines = [begin(*workers, *place, "digits.py", f"{name}.pt") for _ in range(2)]
        for process in machines:
            _, err = process.communicate(timeout=TIMEOUT_S)
            assert process.returncode == 0, err
    weights = [torch.load(f"{name}.pt", weights_only=True) for name in ("notebook", "script", "machines", "torchrun")]
    for name, value in weights[0].items():
        # A plain cell computes the loss of the whole batch, a script those of the shares: these round differently.
        torch.testing.assert_close(weights[1][name], value, rtol=1e-5, atol=1e-6)
        assert all(torch.equal(weights[1][name], other[name]) for other in weights[2:]), name
