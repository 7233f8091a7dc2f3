"""The launcher in a real kernel and in scripts: results, what comes back, and every way in which a launch can end."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from IPython.core.release import version_info

from accel_nb import debug_launcher, notebook_launcher
from accel_nb.errors import ConfigError, MisuseError
from tests.conftest import wait_for
from tests.notebook.cells import setup
from tests.support.kernel import running_kernel

SETUP = """
import os, signal, threading, torch
import torch.distributed as dist
from accel_nb import Accelerator, debug_launcher, notebook_launcher

def reduced(value=1.0):
    total = torch.tensor([value])
    dist.all_reduce(total)
    return int(os.environ["RANK"]), total.item()

def build():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    data = torch.randn(16, 4, dtype=torch.float64).float()
    loader = torch.utils.data.DataLoader(list(zip(data, data.sum(1, keepdim=True))), batch_size=4)
    return model, torch.optim.Adam(model.parameters(), lr=0.05), loader

def train(model, optimizer, loader, losses, epochs=3):
    accelerator = Accelerator(batch="global")
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(epochs):
        for x, y in loader:
            loss = torch.nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return model, accelerator.mixed_precision

def state():
    return (
        {name: str(signal.getsignal(name)) for name in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)},
        dict(os.environ),
        sorted(thread.name for thread in threading.enumerate()),
    )
"""
HEALTHY = [(0, 2.0), (1, 2.0)]


@pytest.fixture(scope="module")
def ready(kernel):
    setup(kernel, SETUP)
    assert kernel.value("debug_launcher(reduced)") == HEALTHY
    return kernel


def fails(kernel, code: str, **options) -> tuple[str, str, str]:
    """Run a launch that fails; returns type, message and traceback, and sees that the next one works."""
    output = kernel.run(code, **options)
    assert output.error is not None, output
    assert kernel.value("debug_launcher(reduced)") == HEALTHY
    return (*output.error, output.traceback)


def test_each_ranks_value_comes_back_in_the_order_of_ranks(ready):
    assert ready.value("notebook_launcher(reduced, (2.0,), 2)") == [(0, 4.0), (1, 4.0)]
    assert ready.value("notebook_launcher(reduced, num_processes=1)") == [(0, 1.0)]
    assert (
        ready.value("notebook_launcher(lambda: (torch.get_num_threads(), dist.get_world_size()), (), 2)")
        == [(max(1, ready.value("len(os.sched_getaffinity(0))") // 2), 2)] * 2
    )


def test_the_launch_reports_what_it_runs_on(ready):
    output = ready.run("result = notebook_launcher(train, (*build(), []), 2, 'bf16')")
    assert "2 workers on cpu" in output.receipt
    assert "precision bf16" in output.receipt
    assert ready.value("[precision for _, precision in result]") == ["bf16", "bf16"]


def test_what_was_trained_comes_back_in_place_and_equals_one_process(ready):
    setup(
        ready,
        "model, optimizer, loader = build()\nlosses, first = [], model[0].weight\n"
        "alone = build()\ntrain(*alone, [])\n"
        "result = notebook_launcher(train, (model, optimizer, loader, losses), 2)",
    )
    assert ready.value("result[0][0] is model and result[1][0] is model and model[0].weight is first")
    assert ready.value("(len(losses), len(optimizer.state))") == (12, 4)
    assert ready.value(
        "all(torch.allclose(a, b, atol=1e-5) for a, b in zip(model.parameters(), alone[0].parameters()))"
    )
    setup(ready, "result = notebook_launcher(train, (model, optimizer, loader, losses), 2)\ntrain(*alone, [])")
    assert ready.value(
        "all(torch.allclose(a, b, atol=1e-5) for a, b in zip(model.parameters(), alone[0].parameters()))"
    )
    assert ready.value("len(losses)") == 24


def test_lambdas_closures_methods_and_classes_of_the_notebook_are_launched(ready):
    setup(
        ready,
        "class Trainer:\n    def __init__(self):\n        self.model, self.log = torch.nn.Linear(1, 1), []\n"
        "    def fit(self, number):\n        self.log.append(number)\n"
        "        torch.nn.init.constant_(self.model.weight, number)\n        return Point(number)\n"
        "class Point:\n    def __init__(self, x): self.x = x\n"
        "trainer = Trainer()\nbound = 3\ndef outer(n):\n    def inner(): return n + bound\n    return inner",
    )
    assert ready.value("[p.x for p in notebook_launcher(trainer.fit, (5,), 2)]") == [5, 5]
    assert ready.value("(trainer.log, trainer.model.weight.item())") == ([5], 5.0)
    assert ready.value("notebook_launcher(outer(4), (), 2)") == [7, 7]


def test_the_kernel_is_as_it_was_before(ready):
    setup(ready, "before = state()\ndebug_launcher(reduced)\nafter = state()")
    assert ready.value("before == after"), ready.value("(before, after)")
    ready.run("before = state()")
    fails(ready, "debug_launcher(lambda: 1 / 0)")
    assert ready.value("before == state()")


def test_it_works_after_threads_accelerators_and_parallel_operations_in_the_kernel(ready):
    setup(
        ready,
        "stop = threading.Event()\nthread = threading.Thread(target=stop.wait)\nthread.start()\n"
        "accelerator = Accelerator()\nmine = accelerator.prepare(torch.nn.Linear(300, 300))\n"
        "mine(torch.randn(300, 300)).sum().backward()",
    )
    assert ready.value("notebook_launcher(lambda: (mine.weight @ mine.weight).shape[0], (), 2)") == [300, 300]
    setup(ready, "stop.set(); thread.join(); del accelerator, mine")


def test_an_error_keeps_its_type_and_points_at_the_functions_lines(ready):
    setup(
        ready,
        "class Odd(Exception): pass\ndef broken():\n    if dist.get_rank() == 1:\n        raise Odd('why')\n"
        "    reduced()",
    )
    kind, message, trace = fails(ready, "debug_launcher(broken)")
    assert (kind, message) == ("Odd", "why")
    assert "rank 1 raised" in trace
    assert "----> 4         raise Odd('why')" in trace
    assert "Cell In[" in trace or version_info < (8, 0)  # IPython 7 names the file of a cell
    assert "launcher.py" not in trace
    assert (
        ready.run("try: debug_launcher(broken)\nexcept Odd as error: print('caught', error)").stdout == "caught why\n"
    )


def test_leaving_by_exit_is_an_error_and_a_death_is_named(ready):
    assert "called exit() with 7" in fails(ready, "debug_launcher(lambda: __import__('sys').exit(7))")[1]
    kind, message, _ = fails(ready, "debug_launcher(lambda: dist.get_rank() and os.kill(os.getpid(), 9) or reduced())")
    assert kind == "WorkerDied"
    assert "rank 1 was ended by SIGKILL" in message


def test_what_cannot_be_copied_is_named_and_the_training_comes_back(ready):
    setup(ready, "log = []\ndef leave():\n    log.append(1)\n    return threading.local()")
    kind, message, _ = fails(ready, "debug_launcher(leave)")
    assert kind == "ShippingError"
    assert re.match(r"what the function returned on rank [01] \(_thread._local\) cannot be copied", message)
    assert ready.value("log") == [1]


def test_a_number_of_processes_is_said_to_have_no_effect_on_a_tpu(ready):
    setup(ready, "from accel_nb.notebook import launcher\nfind, launcher.find_tpu = launcher.find_tpu, lambda: 'v5e'")
    setup(ready, "gpus, launcher.find_gpus = launcher.find_gpus, list")
    output = ready.run("notebook_launcher(lambda: 7, (), 8)")
    assert output.result == "[7]"
    assert "num_processes=8 has no effect: on a TPU one worker uses all chips" in output.texts
    setup(ready, "launcher.find_tpu, launcher.find_gpus = find, gpus")


def test_an_interrupt_ends_a_launch_that_waits_in_a_collective(ready):
    setup(
        ready,
        "log = []\ndef stuck():\n    log.append('started')\n    print('running', flush=True)\n"
        "    if dist.get_rank() == 0: reduced()\n    threading.Event().wait()",
    )
    kind, _, trace = fails(ready, "debug_launcher(stuck)", interrupt_on="running")
    assert kind == "KeyboardInterrupt"
    assert "stopped on every rank; variables and models are kept" in trace
    assert ready.value("log") == ["started"], "rank 0's work came back"


def test_a_restart_begins_with_the_notebooks_values(ready, tmp_path: Path):
    setup(
        ready,
        f"log, marks = [], {str(tmp_path)!r}\ndef flaky(kind):\n    log.append(1)\n"
        "    mark = os.path.join(marks, f'{kind}{dist.get_rank()}')\n    first = not os.path.exists(mark)\n"
        "    open(mark, 'w').close()\n    dist.barrier()\n    if first and dist.get_rank() == 1:\n"
        "        if kind == 'die': os._exit(3)\n"
        "        raise (TimeoutError if kind == 'late' else ValueError)('once')\n"
        "    return len(log), os.environ['TORCHELASTIC_MAX_RESTARTS']",
    )
    for kind in ("raise", "die", "late"):
        output = ready.run(f"log.clear(); print(notebook_launcher(flaky, ({kind!r},), 2, max_restarts=1))")
        assert output.stdout == "[(1, '1'), (1, '1')]\n", output
        assert "restarting from the start" in output.stderr
    kind, *_ = fails(ready, "marks += '/missing'\nnotebook_launcher(flaky, ('raise',), 2, max_restarts=1)")
    assert kind == "FileNotFoundError", "it failed as often as it may"


def test_a_restart_goes_on_from_the_newest_checkpoint(ready, tmp_path: Path):
    setup(
        ready,
        f"folder = {str(tmp_path)!r}\nmodel, optimizer, loader = build()\nalone = build()\ntrain(*alone, [])\n"
        "def die_once(model, optimizer, loader):\n"
        "    accelerator, steps = Accelerator(batch='global'), 0\n"
        "    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)\n"
        "    for _ in range(3):\n        for x, y in loader:\n"
        "            accelerator.backward(torch.nn.functional.mse_loss(model(x), y))\n"
        "            optimizer.step(); optimizer.zero_grad(); steps += 1\n"
        "            if not os.path.exists(folder + '/mark') and steps == 7:\n"
        "                accelerator.wait_for_checkpoint(); dist.barrier()\n"
        "                if dist.get_rank() == 0: open(folder + '/mark', 'w').close(); os._exit(1)\n"
        "                threading.Event().wait()\n    return steps",
    )
    output = ready.run(
        "steps = notebook_launcher(die_once, (model, optimizer, loader), 2, max_restarts=2, "
        "checkpoint={'dir': folder, 'every': 2})"
    )
    assert output.error is None, output.traceback
    assert "restarting from the newest checkpoint, " in output.stderr
    assert 5 <= ready.value("steps")[0] <= 8, "the restart did the rest only"
    assert ready.value(
        "all(torch.allclose(a, b, atol=1e-5) for a, b in zip(model.parameters(), alone[0].parameters()))"
    )


@pytest.mark.nightly
def test_launches_from_several_threads_run_at_once(ready):
    code = (
        "from concurrent.futures import ThreadPoolExecutor\nimport tempfile, pathlib\n"
        "place = pathlib.Path(tempfile.mkdtemp())\n"
        "def meet(name, other):\n    import time\n    (place / name).touch()\n    end = time.monotonic() + 60\n"
        "    while not (place / other).exists():\n        assert time.monotonic() < end, 'the other launch never ran'\n"
        "    return name, reduced()\n"
        "with ThreadPoolExecutor(2) as threads:\n"
        "    both = list(threads.map(lambda pair: debug_launcher(meet, pair), [('a', 'b'), ('b', 'a')]))"
    )
    output = ready.run(code)
    assert output.error is None, output.traceback
    assert ready.value("both") == [[("a", HEALTHY[0]), ("a", HEALTHY[1])], [("b", HEALTHY[0]), ("b", HEALTHY[1])]]


def test_every_ranks_lines_are_shown_with_a_prefix(ready):
    setup(ready, "def speak(): print('hello'); dist.barrier()")
    output = ready.run("notebook_launcher(speak, (), 2, log_line_prefix_template='[${role_name}${local_rank}] ');")
    assert sorted(output.stdout.splitlines()) == ["[default0] hello", "[default1] hello"]


def test_workers_find_what_was_asked_for(ready):
    code = "lambda: [os.environ[n] for n in ('MASTER_ADDR', 'MASTER_PORT', 'TORCHELASTIC_RUN_ID')]"
    assert ready.value(f"notebook_launcher({code}, (), 1, rdzv_id='x')") == [["127.0.0.1", "29500", "x"]]
    assert ready.value(f"notebook_launcher({code}, (), 1, rdzv_endpoint='localhost:77')") == [
        ["localhost", "77", "none"]
    ]
    (first,) = ready.value(f"notebook_launcher({code}, (), 1, use_port=None)")
    assert first[1] not in ("0", "29500")


def test_a_restart_of_the_kernel_leaves_nothing_and_the_next_launch_works(ready):
    launch = "import os\nfrom accel_nb import debug_launcher\npids = debug_launcher(lambda: os.getpid())"
    with running_kernel() as kernel:
        assert kernel.run(launch).error is None
        pids = kernel.value("pids")
        kernel.manager.restart_kernel(now=True)
        kernel.client.wait_for_ready(timeout=60)
        assert wait_for(lambda: not any(psutil.pid_exists(pid) for pid in pids), 2.0)
        assert kernel.run(launch).error is None
        assert len(set(kernel.value("pids"))) == 2


def test_a_port_that_is_taken_is_no_obstacle(ready):
    setup(ready, "import socket\nholder = socket.socket()\nholder.bind(('127.0.0.1', 0))\nholder.listen()")
    assert ready.value("notebook_launcher(reduced, (), 2, use_port=holder.getsockname()[1])") == HEALTHY
    setup(ready, "holder.close()")


def test_different_errors_of_all_ranks_are_reported_once_each(ready):
    code = "def differ():\n    raise [KeyError, IndexError, IndexError][dist.get_rank()]('mine')"
    setup(ready, code)
    kind, _, trace = fails(ready, "debug_launcher(differ, num_processes=3)")
    assert kind in ("KeyError", "IndexError")
    assert trace.count("mine") >= 2
    assert ("then raised IndexError" in trace) or ("then raised KeyError" in trace)


def test_a_launch_that_takes_too_long_is_ended(ready):
    ready.run("import contextlib, io\nerrors = io.StringIO()")
    call = "notebook_launcher(lambda: threading.Event().wait(), (), 2, timeout=0.3, max_restarts=1)"
    kind, message, _ = fails(ready, f"with contextlib.redirect_stderr(errors): {call}")
    assert kind == "TimeoutError", message
    assert "restarting" not in ready.value("errors.getvalue()")


def test_an_argument_that_cannot_be_sent_is_named(ready):
    kind, message, _ = fails(ready, "debug_launcher(print, (1, threading.local()))")
    assert kind == "ShippingError"
    assert message.startswith("argument 1 of print (_thread._local) cannot be sent to the workers")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"mixed_precision": "bf61"}, ["bf61", "notebook_launcher"]),
        ({"num_processes": 0}, ["num_processes=0"]),
        ({"num_nodes": 2, "node_rank": 1}, ["num_nodes=2", "torchrun --nnodes"]),
        ({"use_port": "70000", "max_restarts": -1}, ["use_port='70000'", "max_restarts=-1"]),
        ({"rdzv_backend": "etcd", "rdzv_conf": {"x": 1}}, ["static or c10d", "{'timeout': seconds}"]),
        ({"log_line_prefix_template": "${host}"}, ["host", "${local_rank}"]),
        ({"monitor_interval": 0, "rdzv_endpoint": "here"}, ["monitor_interval=0", "host:port"]),
        ({"acumulate": 2}, ["acumulate", "accumulate"]),
        ({"function": 3}, ["cannot be called"]),
    ],
)
def test_wrong_arguments_are_named_before_anything_starts(arguments, words):
    with pytest.raises(ConfigError) as caught:
        notebook_launcher(**({"function": print, "num_processes": 2} | arguments))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_launch_inside_of_a_worker_is_refused(ready, monkeypatch: pytest.MonkeyPatch):
    kind, message, _ = fails(ready, "debug_launcher(lambda: debug_launcher(print))")
    assert kind == "MisuseError"
    assert "is a worker already" in message
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(MisuseError, match="rank 1 of 2"):
        debug_launcher(print)


SCRIPT = """
import os, sys, torch
import torch.distributed as dist
from accel_nb import notebook_launcher

model = torch.nn.Linear(2, 1)

def work(fail):
    total = torch.ones(1)
    dist.all_reduce(total)
    print("rank", dist.get_rank(), flush=True)
    torch.nn.init.constant_(model.weight, total.item())
    if fail:
        if dist.get_rank() == 0: dist.barrier()
        raise ValueError("broken")
    return total.item()

print(notebook_launcher(work, (False,), 2), model.weight.tolist())
"""


def test_a_script_needs_no_guard_survives_an_interrupt_and_ends_with_what_a_rank_raised(tmp_path: Path):
    more = (
        "import multiprocessing\nchild = multiprocessing.get_context('spawn').Process(target=work)\n"
        "child.start(); child.join(); print('child', child.exitcode)\n"  # which imports this script, launch and all
        "def stuck():\n    print('stuck', os.getpid(), flush=True)\n    if dist.get_rank() == 0: dist.barrier()\n"
        "    __import__('threading').Event().wait()\n"
        "try: notebook_launcher(stuck, (), 2)\nexcept KeyboardInterrupt: print('interrupted', flush=True)\n"
        "notebook_launcher(work, (True,), 2)\n"
    )
    path, errors = tmp_path / "script.py", tmp_path / "errors"
    path.write_text(SCRIPT + more)
    lines: list[str] = []
    with errors.open("w") as stderr:
        script = subprocess.Popen([sys.executable, str(path)], stdout=subprocess.PIPE, stderr=stderr, text=True)
        assert script.stdout is not None
        with script.stdout:
            for line in script.stdout:
                lines.append(line.partition(" ")[0] + "\n" if line.startswith("stuck") else line)
                if line.startswith("stuck"):
                    script.send_signal(signal.SIGINT)
        assert script.wait(60) == 1
    said = errors.read_text()
    assert lines == ["rank 0\n", "[2.0, 2.0] [[2.0, 2.0]]\n", "child 1\n", "stuck\n", "interrupted\n", "rank 0\n"], said
    assert "if __name__ == '__main__':" in said
    assert "rank 1 raised" in said
    assert '--> 15     raise ValueError("broken")' in said
    assert said.rstrip().endswith("ValueError: broken")


TORCHRUN = """
def torchrun_script():
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler
    dist.init_process_group("gloo", timeout=__import__("datetime").timedelta(minutes=1))
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = [(torch.full((4,), float(i)), torch.tensor([float(i)])) for i in range(8)]
    loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data, shuffle=False))
    seen = 0
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        seen += len(x)
    dist.barrier()
    dist.destroy_process_group()
    return seen, [round(value, 5) for value in model.module.weight.flatten().tolist()]
"""


def test_code_for_torchrun_runs_unchanged_in_launches_and_cells(ready):
    setup(ready, TORCHRUN)
    first = ready.value("notebook_launcher(torchrun_script, (), 2)")
    assert first[0] == first[1]
    assert first[0][0] == 4, "each rank's own sampler divides, and nothing else does"
    assert ready.value("notebook_launcher(torchrun_script, (), 2)") == first
    setup(ready, "%%accelerate --cpus 2\nfound = torchrun_script()")
    assert ready.value("found") == first[0]


def test_a_group_that_cannot_be_had_is_refused(ready):
    kind, message, _ = fails(ready, "debug_launcher(lambda: dist.init_process_group('gloo', world_size=3, rank=0))")
    assert (kind, "this worker's group has world_size 2" in message) == ("ConfigError", True)
    assert "group is gloo" in fails(ready, "debug_launcher(lambda: dist.init_process_group('nccl'))")[1]
