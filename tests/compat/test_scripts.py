"""Scripts in the style of public tutorials, run unchanged on one and on two real ranks.

What a script prints from one process under accel_nb is what it prints under the package that it was written for; and
two processes, each with half of the batch, print the same as one.
"""

from __future__ import annotations

import contextlib
import functools
import io
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_nb import compat
from accel_nb.runtime.process.environment import set_rank_variables
from accel_nb.runtime.world import World
from tests.ranks.launch import run_ranks

SCRIPTS = Path(__file__).parent / "scripts"
_NUMBER = re.compile(r"-?\d+\.\d+")

# Scripts whose result does not depend on how many processes share a batch, with the batch of one process.
TRAINING = {
    "plain_loop": 32,
    "accumulation": 32,
    "accumulation_by_hand": 32,
    "clipping_and_schedule": 16,
    "mixed_precision": 16,
    "evaluation": 32,
    "early_stop": 8,
    "local_sgd": 8,
    "adversarial": 16,
    "cross_validation": 32,
    "tracking": 16,
}


def run_script(world: World, package: str, name: str, *arguments: str) -> str:
    """Run a script as a program and return what it printed."""
    set_rank_variables(world)
    if package == "ours":
        compat.install()
    sys.argv = [f"{name}.py", *arguments]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name="__main__")
    origin = sys.modules["accelerate"].__file__ or ""
    assert ("accel_nb" in origin) is (package == "ours"), f"accelerate came from {origin}"
    return printed.getvalue()


def assert_alike(one: str, other: str) -> None:
    """Compare two outputs: words exactly, numbers within rounding."""
    assert _NUMBER.sub("N", one) == _NUMBER.sub("N", other)
    numbers = [[float(found) for found in _NUMBER.findall(text)] for text in (one, other)]
    assert numbers[0] == pytest.approx(numbers[1], rel=2e-4, abs=2e-4)


@functools.cache
def printed_by_one_process(name: str) -> str:
    """Return what a script prints under accel_nb, which several tests compare."""
    [printed] = run_ranks(
        run_script, 1, "ours", name, *(["--batch_size", str(TRAINING[name])] if name in TRAINING else [])
    )
    return printed


@pytest.mark.parametrize("name", TRAINING)
def test_two_processes_compute_what_one_does(name: str) -> None:
    size = TRAINING[name]
    alone = printed_by_one_process(name)
    first, second = run_ranks(run_script, 2, "ours", name, "--batch_size", str(size // 2))
    assert alone
    assert second == ""
    assert_alike(first, alone)


@pytest.mark.parametrize("name", [*TRAINING, "batch_size_finder"])
def test_one_process_computes_what_the_other_package_does(name: str) -> None:
    pytest.importorskip("accelerate")
    arguments = ["--batch_size", str(TRAINING[name])] if name in TRAINING else []
    [theirs] = run_ranks(run_script, 1, "theirs", name, *arguments)
    assert_alike(printed_by_one_process(name), theirs)


@pytest.mark.parametrize("size", [1, 2])
def test_samples_are_repeated_and_ordered_by_a_seed_as_in_the_other_package(size: int) -> None:
    pytest.importorskip("accelerate")
    [ours, *_] = run_ranks(run_script, size, "ours", "repeated_samples")
    [theirs, *_] = run_ranks(run_script, size, "theirs", "repeated_samples")
    assert ours.count("[") == (13 if size == 1 else 7)
    assert ours == theirs


def test_the_plain_loop_equals_plain_pytorch() -> None:
    [printed] = run_ranks(run_script, 1, "ours", "plain_loop")
    torch.manual_seed(0)
    digits = load_digits()
    dataset = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
    loader = DataLoader(dataset, batch_size=32, shuffle=True, generator=torch.Generator().manual_seed(1))
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for _ in range(2):
        for inputs, targets in loader:
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    total = sum(parameter.detach().double().abs().sum() for parameter in model.parameters())
    assert_alike(printed, f"keys=['0.weight', '0.bias', '2.weight', '2.bias']\nweights={float(total):.6f}\n")


def test_sizes_are_searched_by_all_processes_together() -> None:
    assert run_ranks(run_script, 2, "ours", "batch_size_finder") == [
        "fits=True more than one try=True finite=True\n",
        "",
    ]


@pytest.mark.parametrize("size", [1, 2])
def test_order_printing_and_parts(size: int) -> None:
    first, *others = run_ranks(run_script, size, "ours", "main_first_and_logging")
    kind = "NO" if size == 1 else "MULTI_CPU"
    assert first == (
        f"cache=written by 0\nsaid=['main']\nanswers=['A', 'B', 'C', 'D', 'E']\ntype={kind} processes={size}\n"
    )
    assert others == [""] * (size - 1)


def test_weights_that_are_averaged_now_and_then_end_equal() -> None:
    first, _ = run_ranks(run_script, 2, "ours", "local_sgd", "--local_sgd_steps", "3")
    assert first.startswith("equal=True")
