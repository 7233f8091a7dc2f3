"""The law: a cell on N workers ends with the weights that one process ends with, for the same seed and global batch."""

from __future__ import annotations

import textwrap

import pytest

from tests.notebook.cells import run
from tests.notebook.digits_training import EXPLICIT, KEEP, PLAIN, SETUP, assert_equal, weights
from tests.support.nightly import nightly

WINDOWED = """
batches = list
for epoch in range(2):
    order = list(loader)
    for start in range(0, len(order), {accumulate}):
        window = order[start:start + {accumulate}]
        optimizer.zero_grad()
        for x, y in window:
            (F.cross_entropy(model(x), y) / len(window)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
"""


@pytest.mark.parametrize(
    ("num_samples", "workers"),
    [(43, 1), (48, 2), (43, 2), (43, 3), (41, 3), *map(nightly, (48, 41, 41, 48), (1, 1, 2, 3))],
)
def test_plain_cell(kernel, num_samples, workers):
    setup = SETUP.format(num_samples=num_samples)
    weights(kernel, "one", setup, PLAIN, None)
    weights(kernel, "many", setup, PLAIN, f"--cpus {workers}")
    assert_equal(kernel)
    assert kernel.value("one_draw == many_draw"), "the notebook's random numbers go on as if the cell had run in it"


@pytest.mark.parametrize(("num_samples", "workers"), [(48, 2), (43, 3), nightly(43, 2), nightly(48, 3)])
def test_plain_cell_with_accumulation(kernel, num_samples, workers):
    setup = SETUP.format(num_samples=num_samples)
    weights(kernel, "one", setup, WINDOWED.format(accumulate=2), None)
    weights(kernel, "many", setup, PLAIN, f"--cpus {workers} --accumulate 2")
    assert_equal(kernel)


@pytest.mark.parametrize(
    ("num_samples", "accumulate"), [(43, 1), (43, 2), (41, 2), *map(nightly, (48, 48, 41), (1, 2, 1))]
)
def test_explicit_cell_equals_one_process_with_the_merged_batch(kernel, num_samples, accumulate):
    setup = SETUP.format(num_samples=num_samples)
    merged = setup.replace("batch_size=8", "batch_size=16")
    weights(kernel, "one", merged, WINDOWED.format(accumulate=accumulate), None)
    weights(kernel, "many", setup, EXPLICIT, f"--cpus 2 --accumulate {accumulate}")
    assert_equal(kernel)


def test_training_goes_on_in_the_next_cell(kernel):
    setup = SETUP.format(num_samples=43)
    weights(kernel, "one", setup, PLAIN + PLAIN, None)
    output = kernel.run(setup)
    assert output.error is None
    assert run(kernel, PLAIN, "--cpus 2").error is None
    output = run(kernel, PLAIN, "--cpus 2")
    assert output.error is None, output.traceback
    kernel.run(KEEP.format(name="many"))
    assert_equal(kernel)


def test_training_inside_a_function(kernel):
    function = "def train():\n" + textwrap.indent(PLAIN, "    ")
    setup = SETUP.format(num_samples=43) + function
    weights(kernel, "one", setup, "train()", None)
    weights(kernel, "many", setup, "train()", "--cpus 2")
    assert_equal(kernel)


def test_everything_made_in_the_cell(kernel):
    setup = SETUP.format(num_samples=43)
    weights(kernel, "one", "", setup + PLAIN, None)
    kernel.run("del model, optimizer, loader, scheduler, X, Y")
    output = run(kernel, setup + PLAIN, "--cpus 2")
    assert output.error is None, output.traceback
    kernel.run(KEEP.format(name="many"))
    assert_equal(kernel)


def test_evaluation_in_the_cell_sees_every_sample_once(kernel):
    kernel.run(SETUP.format(num_samples=43))
    body = (
        PLAIN
        + """
model.eval()
count = 0
with torch.no_grad():
    for x, y in loader:
        count += len(y)
"""
    )
    output = run(kernel, body, "--cpus 2")
    assert output.error is None, output.traceback
    assert kernel.value("count") == 43


def test_notebook_changes_between_cells_reach_the_workers(kernel):
    setup = SETUP.format(num_samples=40)
    change = "for group in optimizer.param_groups: group['lr'] = 0.001\nwith torch.no_grad(): model[0].bias.add_(1.0)"
    weights(kernel, "one", setup, PLAIN + change + PLAIN, None)
    kernel.run(setup)
    assert run(kernel, PLAIN, "--cpus 2").error is None
    kernel.run(change)
    assert run(kernel, PLAIN, "--cpus 2").error is None
    kernel.run(KEEP.format(name="many"))
    assert_equal(kernel)


def test_optimizer_made_anew_steps_the_workers_model(kernel):
    setup = SETUP.format(num_samples=40)
    anew = (
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)\n"
    )
    weights(kernel, "one", setup, PLAIN + anew + PLAIN, None)
    kernel.run(setup)
    assert run(kernel, PLAIN, "--cpus 2").error is None
    kernel.run(anew)
    output = run(kernel, PLAIN, "--cpus 2")
    assert output.error is None, output.traceback
    kernel.run(KEEP.format(name="many"))
    assert_equal(kernel)


def test_receipt_says_what_was_prepared(kernel):
    kernel.run(SETUP.format(num_samples=40))
    output = run(kernel, PLAIN, "--cpus 2 --precision bf16")
    assert output.error is None, output.traceback
    for part in ("2 workers on cpu", "ddp", "precision bf16", "model", "optimizer", "loader", "batch 8 = 2 x 4"):
        assert part in output.receipt
