"""Cells and flags that are wrong, and workers that fail: the kernel says what and where, and goes on."""

from __future__ import annotations

import os
import re
import signal
import sys
import time

import psutil
import pytest

from tests.conftest import wait_for
from tests.notebook.cells import done, run, setup
from tests.support.kernel import running_kernel

ONE_RAISES = """if accelerator.process_index == 1:
    raise ValueError('only here')
accelerator.wait_for_everyone()"""

ONE_EXITS = """import os
if accelerator.process_index == 1: os._exit(3)
accelerator.wait_for_everyone()"""


@pytest.fixture(autouse=True)
def next_cell_works(kernel):
    yield
    assert done(kernel, "print('fine')").stdout == "fine\n"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("def broken(:", "SyntaxError: invalid syntax"),
        ("        def deeper(): pass\n    def less(): pass", "IndentationError: unindent does not match"),
        ("return 3", "SyntaxError: 'return' outside function"),
    ],
)
def test_syntax_error_is_reported_once_before_anything_runs(kernel, line, message):
    output = run(kernel, f"x = 2\n{line}\nx = 3")
    assert output.error is not None
    assert output.error[0] == "CellSyntaxError"
    assert output.traceback.count(message) == 1
    assert line.splitlines()[-1] in output.traceback
    assert f":{2 + len(line.splitlines())}\n" in output.traceback
    assert "IPython" not in output.traceback
    assert (output.displays, output.stderr) == ([], "")


def test_a_warning_of_the_compiler_is_given_no_more_often_than_without_workers(kernel):
    lines = "x = 2\nprint(x is 2)\ndef is_two(y): return y is 2"
    outputs = kernel.run(lines), run(kernel, f"\n{lines}")
    counts = [output.stderr.count("SyntaxWarning") for output in outputs]
    assert counts[0] >= counts[1] > 0
    assert "<cell>" not in outputs[1].stderr


def test_syntax_error_of_code_that_the_cell_loads_is_detected_by_the_cells_line(kernel):
    output = run(kernel, "\ndef load():\n    exec('a b')\nload()")
    assert output.error == ("CellSyntaxError", "invalid syntax (<string>, line 1)")
    assert "exec('a b')" in output.traceback
    assert "SyntaxError: invalid syntax" in output.traceback
    assert "accel_nb/notebook" not in output.traceback


def test_exception_on_every_rank_keeps_type_and_line(kernel):
    output = run(kernel, "x = 1\nvalues = {}\nvalues['missing']")
    assert output.error == ("KeyError", "'missing'")
    # On a busy machine the kernel may stop to wait for the other rank's error.
    assert re.search("(every rank|rank [01]) raised:", output.traceback)
    assert "----> 4 values['missing']" in output.traceback


def test_exception_on_one_rank_is_reported_at_once(kernel):
    started = time.monotonic()
    output = run(kernel, ONE_RAISES)
    assert output.error == ("ValueError", "only here")
    assert "rank 1 raised:" in output.traceback
    assert "----> 3     raise ValueError('only here')" in output.traceback
    assert time.monotonic() - started < 5


def test_results_come_back_beside_an_exception_without_a_text(kernel):
    output = run(kernel, "found = 5\nclass Odd(Exception):\n    def __str__(self): return 1 / 0\nraise Odd")
    assert output.error == ("PoolError", "__main__.Odd: <exception str() failed>")
    assert "----> 5 raise Odd" in output.traceback
    assert kernel.value("found") == 5


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no groups of errors")
def test_a_group_of_exceptions_is_shown_with_its_parts(kernel):
    output = run(kernel, "found = 6\nraise ExceptionGroup('several', [ValueError(1), KeyError('k')])")
    assert output.error == ("PoolError", "ExceptionGroup: several (2 sub-exceptions)")
    assert "| ValueError: 1\n" in output.traceback
    assert ("accel_nb/" in output.traceback, output.stderr) == (False, "")
    assert kernel.value("found") == 6
    output = kernel.run("def fail(): raise ExceptionGroup('several', [ValueError(1)])\n"
                        "from accel_nb import notebook_launcher\nnotebook_launcher(fail, num_processes=1)")  # fmt: skip
    assert "raised:\n" in output.stderr


def test_a_wrong_use_of_a_magic_is_shown_once_as_without_workers(kernel):
    outputs = [kernel.run("%none_such 3"), run(kernel, "%none_such 3")]
    assert outputs[0].stderr.strip() == outputs[1].stderr.strip() != ""


def test_exception_class_of_the_cell_keeps_its_type(kernel):
    kernel.run("class Odd(Exception):\n    pass")
    output = kernel.run(
        "try:\n    get_ipython().run_cell_magic('accelerate', '--cpus 2', 'raise Odd(3)')\n"
        "except Odd as error:\n    print('caught', error)"
    )
    assert "caught 3" in output.stdout, output.traceback


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("input('name? ')", "input() does not work on a worker"),
        ("import getpass\ngetpass.getpass()", "neither do getpass() and debuggers"),
        ("breakpoint()\nx = 1", "neither do getpass() and debuggers"),
        ("exit()", "the cell called exit() with 0; the workers keep running"),
        ("import sys; sys.exit(7)", "the cell called exit() with 7; the workers keep running"),
    ],
)
def test_what_a_worker_cannot_do_is_refused(kernel, body, message):
    output = run(kernel, body)
    assert output.error is not None
    assert message in output.error[1]


def test_names_that_cannot_be_sent_are_named_with_the_way_out(kernel):
    kernel.run("import threading\nlock = threading.local()\nstream = (i for i in range(3))\nnext(stream)")
    output = run(kernel, "lock.acquire(); next(stream)")
    assert output.error is not None
    assert output.error[0] == "ShippingError"
    for part in ("`lock` (_thread._local)", "`stream` (builtins.generator)", "Make it inside the %%accelerate cell"):
        assert part in output.error[1]


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ("--cpus 0", ["cpus: 0", "from 1 to 256"]),
        ("--gpus 1", ["no GPU is visible; use --cpus N"]),
        ("--precison bf16", ["--precison is not a flag; did you mean --precision?"]),
        ("--cpus 2 --gpus 2", ["only one of the two"]),
        ("--max-restarts -1", ["max_restarts: -1", "from 0 to 1000"]),
        ("--cpus 2 --ranks 5", ["rank 5 is outside of a world of 2"]),
        ("--cpus 0 --precison bf16 --zero-stage 4", ["cpus: 0", "--precison", "zero_stage: 4"]),
    ],
)
def test_wrong_flags_are_reported_all_at_once(kernel, flags, parts):
    output = run(kernel, "ran = True", flags)
    assert output.error is not None
    assert output.error[0] == "ConfigError"
    assert all(part in output.error[1] for part in parts), output.error[1]
    assert kernel.value("'ran' in globals()") is False


def test_code_and_flags_that_disagree_are_both_named(kernel):
    body = "from accel_nb import Accelerator\nAccelerator(mixed_precision='no')"
    output = run(kernel, body, "--cpus 2 --precision bf16")
    assert output.error is not None
    assert "--precision bf16" in output.error[1]
    assert "Accelerator(...)" in output.error[1]


def test_an_exiting_rank_is_named(kernel):
    output = run(kernel, ONE_EXITS)
    assert output.error is not None
    assert output.error[0] == "WorkerDied"
    assert "rank 1 exited with code 3" in output.error[1]


def test_a_killed_rank_is_named(kernel):
    output = run(
        kernel,
        "import os, signal\nif accelerator.process_index == 0: os.kill(os.getpid(), signal.SIGKILL)\n"
        "accelerator.wait_for_everyone()",
    )
    assert output.error is not None
    assert "rank 0 was ended by SIGKILL" in output.error[1]


def test_all_ranks_killed(kernel):
    output = run(kernel, "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    assert output.error is not None
    assert output.error[0] == "WorkerDied"


def test_unknown_commands_get_the_nearest_name(kernel):
    run(kernel, "pass")
    output = kernel.run("%accelerate stauts")
    assert output.error is not None
    assert "did you mean 'status'?" in output.error[1]
    assert "takes names of variables" in str(kernel.run("%accelerate pull").error)
    assert "no rank 9; the last cell ran on ranks 0 and 1" in str(kernel.run("%accelerate logs 9").error)


@pytest.mark.parametrize("flags", ["--cpus $number", "--cpus 2 --checkpoint '/tmp/{number}/runs'"])
def test_variables_in_the_line_are_refused_and_not_taken_for_text(kernel, flags):
    kernel.run("number = 2")
    output = run(kernel, "pass", flags)
    assert output.error is not None
    assert "variables of the notebook (number) are not inserted into the line; write the value" in output.error[1]


@pytest.mark.parametrize("line", ["%accelerate --help", "%accelerate help", "%%accelerate --help\nsome text"])
def test_help_lists_every_flag(kernel, line):
    shown = kernel.run(line).stdout
    assert "--precision no|fp16" in shown
    assert "--resume auto|PATH" in shown
    assert ("status|wait|" in shown) is not line.startswith("%%")


def test_a_timeout_ends_the_cell(kernel):
    output = run(kernel, "while True: pass", "--cpus 2 --timeout 0.3")
    assert output.error is not None
    assert output.error[0] == "TimeoutError"


def test_interrupt_with_one_rank_asleep_and_one_in_a_collective(kernel):
    done(kernel, "kept = accelerator.process_index + 10")
    body = (
        "import threading\nprint('go', flush=True)\nif accelerator.process_index == 0: threading.Event().wait(60)\n"
        "accelerator.wait_for_everyone()"
    )
    started = time.monotonic()
    output = run(kernel, body, interrupt_on="go")
    assert time.monotonic() - started < 3
    assert output.error is not None
    assert output.error[0] == "KeyboardInterrupt"
    assert done(kernel, "print(kept)").stdout == "10\n"
    assert (
        kernel.run("import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)").stdout
        == "True\n"
    )


def test_an_interrupt_that_the_cell_handles_is_no_error(kernel):
    body = "import time\ntry:\n    print('go', flush=True)\n    while True: time.sleep(0.01)\n"
    output = run(kernel, f"{body}except KeyboardInterrupt: print('ended early')\nlast = 8", interrupt_on="go")
    assert (output.error, output.stdout) == (None, "go\nended early\n")
    assert kernel.value("last") == 8


def test_a_cell_that_handles_an_interrupt_may_save_for_longer_than_the_grace_time(kernel, tmp_path):
    setup(kernel, "from accel_nb.pool.control import stop_escalation\nstop_escalation.GRACE_S = 0.5")
    setup(
        kernel,
        "import time, torch\nmodel = torch.nn.Linear(2, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\ndata = torch.ones(4, 2)",
    )
    body = f"""try:
    for step in range(10**9):
        model(data).pow(2).mean().backward()
        optimizer.step(); optimizer.zero_grad()
        if step == 20: print("go", flush=True)
except KeyboardInterrupt:
    until = time.monotonic() + 1
    while time.monotonic() < until: pass
    torch.save(model.state_dict(), {str(tmp_path / "model.pt")!r})
"""
    output = run(kernel, body, interrupt_on="go")
    assert output.error is None, output.traceback
    assert not any("differ" in text for text in output.texts)
    assert kernel.value("step >= 20") is True
    setup(kernel, f"saved = torch.load({str(tmp_path / 'model.pt')!r})")
    assert kernel.value("bool((model.weight == saved['weight']).all())") is True
    setup(kernel, "stop_escalation.GRACE_S = 2.0")


def test_an_error_of_code_that_handles_an_interrupt_is_shown(kernel):
    body = "try:\n    print('go', flush=True)\n    while True: pass\nexcept KeyboardInterrupt: {}['missing']"
    output = run(kernel, body, interrupt_on="go")
    assert output.error is not None
    assert output.error[0] == "KeyboardInterrupt"
    assert "code that handled the interrupt raised on rank 0" in output.traceback
    assert "KeyError: 'missing'" in output.traceback


def test_an_interrupted_training_keeps_what_it_learned(kernel):
    kernel.run(
        "import torch\ntorch.manual_seed(0)\nmodel = torch.nn.Linear(2, 1)\nbefore = model.weight.detach().clone()\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\ndata = torch.ones(4, 2)"
    )
    body = (
        "for step in range(10**9):\n    model(data).pow(2).mean().backward()\n"
        "    optimizer.step(); optimizer.zero_grad()\n"
        "    if step == 20: print('go', flush=True)"
    )
    output = run(kernel, body, interrupt_on="go")
    assert output.error is not None
    assert output.error[0] == "KeyboardInterrupt"
    assert kernel.value("bool((model.weight != before).all())") is True
    assert kernel.value("step >= 20") is True


def test_ranks_that_are_interrupted_after_different_steps_continue_from_one(kernel):
    setup(
        kernel,
        "import copy, threading, torch\ntorch.manual_seed(0)\nmodel = torch.nn.Linear(4, 1).double()\n"
        "optimizer = torch.optim.Adam(model.parameters(), lr=0.1)\ndata = torch.randn(8, 4).double()\n"
        "average = torch.zeros(()).double()\ncounts = {'steps': 0}\nnumber = 0\nranks = torch.distributed",
    )
    loop = (
        "for number in range({}):\n    model(data).pow(2).mean().backward()\n{}"
        "    optimizer.step(); optimizer.zero_grad()\n"
        "    average.mul_(0.9).add_(model.weight.detach().sum()); counts['steps'] += 1\n"
    )
    # Rank 1 has not made the step yet, in the middle of which it is interrupted.
    wait = (
        "    if number == 3: print('go', flush=True); getattr(ranks, 'get_' + 'rank')() and threading.Event().wait()\n"
    )
    output = run(kernel, loop.format(10**9, wait), interrupt_on="go")
    assert output.error is not None
    assert output.error[0] == "KeyboardInterrupt"
    setup(kernel, "twin = copy.deepcopy([model, optimizer, average, counts, number])")
    output = done(kernel, loop.format("number % 3 + counts['steps'] % 5 + 2", ""))
    assert not any("differ" in text for text in output.texts)
    names = ("model", "optimizer", "average", "counts", "number")
    setup(kernel, f"trained = [{', '.join(names)}]\n{', '.join(names)} = twin")
    setup(kernel, loop.format("number % 3 + counts['steps'] % 5 + 2", ""))
    assert kernel.value("trained[3:] == [counts, number]") is True
    assert kernel.value("float((trained[0].weight - model.weight).abs().max())") < 1e-12
    assert kernel.value("float(abs(trained[2] - average))") < 1e-12


@pytest.mark.parametrize("evaluates", [True, False])
def test_code_that_handles_an_interrupt_evaluates_with_the_weights_of_rank_0(kernel, evaluates):
    setup(
        kernel,
        "import threading, torch\ntorch.manual_seed(0)\nmodel = torch.nn.Linear(4, 1).double()\n"
        "optimizer = torch.optim.Adam(model.parameters(), lr=0.1)\ndata = torch.randn(8, 4).double()\n"
        "ranks, value = torch.distributed, None",
    )
    mode = "eval" if evaluates else "train"
    body = f"""try:
    for step in range(10**9):
        model(data).pow(2).mean().backward()
        if step == 3:
            print("go", flush=True)
            if getattr(ranks, "get_" + "rank")(): threading.Event().wait()
        optimizer.step(); optimizer.zero_grad()
except KeyboardInterrupt:
    value = model.{mode}()(data).sum().item()
"""
    output = run(kernel, body, interrupt_on="go")
    if evaluates:
        assert output.error is None, output.traceback
        assert kernel.value("value - model(data).sum().item()") == 0
    else:
        assert output.error is not None
        assert "MisuseError: Linear is called after an interrupt of the cell" in output.traceback


def test_interrupts_amid_large_reductions_never_lose_a_rank(kernel):
    kernel.run(
        "import torch\nmodel = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(4)])\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)\ndata = torch.ones(2, 1024)\ntrained = 0"
    )
    body = (
        "for step in range(10**9):\n    model(data).pow(2).mean().backward()\n"
        "    optimizer.step(); optimizer.zero_grad(); trained += 1\n    if step == 5: print('go', flush=True)"
    )
    for _ in range(8):
        before = kernel.value("trained")
        output = run(kernel, body, interrupt_on="go")
        assert output.error is not None
        assert output.error[0] == "KeyboardInterrupt", output.traceback
        assert "did not stop" not in output.traceback
        assert kernel.value("trained") > before


def test_endless_python_loop_is_interrupted(kernel):
    output = run(kernel, "print('go', flush=True)\nwhile True: pass", interrupt_on="go")
    assert output.error is not None
    assert output.error[0] == "KeyboardInterrupt"


def test_very_many_lines_are_bounded_and_the_end_is_shown(kernel):
    output = run(kernel, "for i in range(200_000): print('line', i)")
    assert output.error is None
    assert "line 199999" in output.stdout
    assert len(output.stdout) < 2_000_000
    assert "%accelerate logs" in output.stdout


def test_text_that_is_not_utf8_is_shown_replaced(kernel):
    output = done(kernel, "import os\nos.write(1, b'caf\\xe9 \\xff\\n')")
    assert output.stdout == "caf\\xe9 \\xff\n"


def test_kernel_death_leaves_nothing():
    with running_kernel() as kernel:
        kernel.run("%load_ext accel_nb")
        done(kernel, "pass")
        family = psutil.Process(kernel.pid).children(recursive=True)
        assert len(family) == 3
        os.kill(kernel.pid, signal.SIGKILL)
        assert wait_for(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in family), 2.0)
