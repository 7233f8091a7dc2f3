"""Errors of this package in a notebook: what is wrong and where in the user's code, in a few lines."""

from __future__ import annotations

import pytest

from tests.notebook.cells import done, run, setup
from tests.support.kernel import Kernel, Output

SETUP = """
import threading, torch
from torch import nn
from accel_nb import Accelerator, notebook_launcher
lock, numbers = threading.local(), (n for n in range(3))
next(numbers)
def one(): return 1
def misuse():
    from accel_nb import Accelerator
    Accelerator().backward(3)
def recurse(n): return recurse(n + 1)
"""


@pytest.fixture(scope="module", autouse=True)
def ready(kernel: Kernel) -> None:
    setup(kernel, SETUP)


def refused(output: Output, kind: str, *words: str, num_lines: int = 1) -> None:
    assert output.error is not None
    assert output.error[0] == kind
    lines = output.traceback.strip().splitlines()
    assert len(lines) == num_lines, output.traceback
    assert "accel_nb/" not in output.traceback.replace("accel_nb/test", "")
    for word in words:
        assert word in output.traceback


@pytest.mark.parametrize(
    ("code", "kind", "words", "num_lines"),
    [
        ("notebook_launcher(one, num_processes=-1)", "ConfigError", "notebook_launcher(num_processes=-1)", 1),
        ("notebook_launcher(one, args=(3), num_processes=1)", "ConfigError", "args is of type int: give a tuple", 1),
        ("notebook_launcher(one, num_processes=2, nothing=3)", "ConfigError", "nothing is not an option", 1),
        ("notebook_launcher(lambda: lock, num_processes=1)", "ShippingError", "_thread._local", 1),
        ("notebook_launcher(misuse, num_processes=1)", "MisuseError", "Accelerator().backward(3)\n", 3),
        ("notebook_launcher(one, num_processes=1, checkpoint={'resume': '/no/where'})", "NoCheckpoint", "/no/where", 1),
        ("Accelerator(mixed_precision='x', cpu=True)", "ConfigError", "precision: x", 1),
        ("a = Accelerator(cpu=True)\na.load_state('/no/where')", "NoCheckpoint", "line 2: a.load_state('/no", 2),
        ("%%accelerate --cpus 1\naccelerator.backward(3)", "MisuseError", "backward takes the loss", 2),
        ("%%accelerate --cpus 1\nx = 1\naccelerator.backward(3)", "MisuseError", "line 3: accelerator.backward(3)", 3),
        ("%%accelerate --cpus 1\nprint(lock)", "ShippingError", "`lock`", 1),
        ("%%accelerate --nothing\n1", "ConfigError", "--nothing is not a flag", 1),
        ("%%accelerate --cpus 1 --resume /no/where\nx = 1", "NoCheckpoint", "--resume /no/where", 1),
        ("%%accelerate --cpus 1 --resume /no/where --background\nx = 1", "NoCheckpoint", "--resume /no/where", 1),
        ("%accelerate plan --nothing", "ConfigError", "--nothing is not a flag", 1),
        ("%accelerate status now", "ConfigError", "takes no arguments, and was given now", 1),
        ("%accelerate push absent", "UnknownNameError", "the notebook has no name 'absent'", 1),
        ("%accelerate push lock numbers", "ShippingError", "`numbers` (builtins.generator)", 2),
    ],
)
def test_errors_say_what_is_wrong_and_show_no_code_but_the_users(
    kernel: Kernel, code: str, kind: str, words: str, num_lines: int
):
    refused(kernel.run(code), kind, words, num_lines=num_lines)


def test_a_folder_that_was_deleted_is_named(kernel: Kernel, tmp_path):
    done(kernel, "pass", "--cpus 1")
    setup(kernel, f"import os\nfolder = os.getcwd()\nos.chdir({str(tmp_path)!r})\nos.rmdir({str(tmp_path)!r})")
    refused(run(kernel, "pass", "--cpus 1"), "PoolError", "the notebook's folder was deleted")
    setup(kernel, "os.chdir(folder)")
    done(kernel, "pass", "--cpus 1")


def test_names_of_no_run_and_no_variable_are_refused(kernel: Kernel):
    done(kernel, "x = 1", "--cpus 1 --name mine")
    refused(kernel.run("%accelerate attach yours"), "ConfigError", "attach yours", "'mine'")
    assert kernel.run("%accelerate attach mine").error is None
    refused(kernel.run("%accelerate pull absent"), "UnknownNameError", "no name 'absent'", num_lines=2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("master_addr='10.0.0.7'", "master_addr='10.0.0.7' has no effect on the launch"),
        ("rdzv_backend='c10d'", "rdzv_backend='c10d' has no effect"),
        ("rdzv_endpoint='far:77'", "rdzv_endpoint='far:77' has no effect on the launch"),
        ("rdzv_endpoint='localhost:77', use_port=78", "use_port='78' has no effect: rdzv_endpoint='localhost:77'"),
        ("use_port=78", None),
        ("rdzv_endpoint='localhost:77', use_port=77", None),
    ],
)
def test_arguments_without_effect_are_named(kernel: Kernel, arguments: str, words: str | None):
    output = kernel.run(f"returned = notebook_launcher(one, num_processes=1, {arguments})")
    assert output.error is None, output.traceback
    notes = [text for text in output.texts if "has no effect" in text]
    assert len(notes) == (words is not None)
    assert words is None or words in notes[0]


def test_an_endless_recursion_ends_in_few_lines(kernel: Kernel):
    for output in (
        run(kernel, "recurse(0)", "--cpus 1"),
        kernel.run("notebook_launcher(recurse, (0,), num_processes=1)"),
        run(kernel, "def deep(n):\n    try:\n        deep(n + 1)\n    except Exception as e:\n"
                    "        raise ValueError(n) from e\ndeep(0)", "--cpus 1"),
    ):  # fmt: skip
        assert output.error is not None
        assert output.error[0] in ("RecursionError", "ValueError")
        assert "are left out)" in output.traceback or output.error[0] == "ValueError"
        assert output.traceback.count("recurse(n + 1)") + output.traceback.count("raise ValueError(n)") < 200
    done(kernel, "pass", "--cpus 1")


_WITH_SLOTS = """
class Refused(Exception):
    __slots__ = ("code",)
    def __init__(self, code): self.code = code
    def __str__(self): return f"code {self.code}"
"""


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("raise Refused(3)", ("Refused", "code 3")),
        ("import numpy\nnumpy.array(1).sort()", ("AxisError", "axis -1 is out of bounds for array of dimension 0")),
    ],
)
def test_an_error_whose_class_has_slots_is_the_same_in_the_notebook(kernel: Kernel, code: str, expected: object):
    setup(kernel, _WITH_SLOTS)
    assert run(kernel, code).error == expected


def test_an_error_in_a_captured_cell_is_shown(kernel: Kernel):
    output = run(kernel, "%%capture out\nprint('cap' + 'tured')\nfirst = 1\n1 / 0\nsecond = 2")
    assert output.error is None, "as in a notebook"
    assert "ZeroDivisionError" in output.stderr
    assert "division by zero" in output.stderr
    assert "captured" not in output.stdout + output.stderr
    assert kernel.value("(first, 'second' in globals(), out.stdout)") == (1, False, "captured\n")
