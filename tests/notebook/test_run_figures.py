"""What receipt, panel and errors say of a run, against the cell's own lists."""

from __future__ import annotations

import csv
import io
import itertools
import re
import statistics
from typing import Any

import pytest
from IPython.core.release import version_info

from accel_nb.ui.rank_progress import PAUSE_RATIO
from tests.notebook.cells import STATE
from tests.support.kernel import Kernel

SETUP = """
import time, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
x = torch.randn(160, 4)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 8)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
losses, times = [], []
"""

TRAIN = """%%accelerate --cpus 2 {flags}
losses, times = [], []
for epoch in range({epochs}):
    for inputs, targets in loader:
        loss = ((model(inputs) - targets) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        time.sleep(0.01)
        optimizer.step()
        losses.append(loss.item())
        times.append(time.time())
"""

TWO_LOSSES = """%%accelerate --cpus 2
first, second = nn.Linear(4, 1), nn.Linear(4, 1)
opt_first = torch.optim.SGD(first.parameters(), 0.01)
opt_second = torch.optim.SGD(second.parameters(), 0.1)
for inputs, targets in loader:
    d_loss = ((first(inputs) - targets) ** 2).mean()
    opt_first.zero_grad(); d_loss.backward(); opt_first.step()
    g_loss = ((second(inputs) - targets) ** 2).mean() + 100
    opt_second.zero_grad(); g_loss.backward(); opt_second.step()
"""


@pytest.fixture(scope="module", autouse=True)
def names_of_the_cells(kernel: Kernel) -> None:
    output = kernel.run(SETUP)
    assert output.error is None, output.traceback


def facts(kernel: Kernel) -> dict[str, Any]:
    return kernel.value(f"{STATE}.facts()")


def test_steps_are_one_count_from_1_in_each_run(kernel: Kernel, tmp_path):
    for _ in range(2):  # with a folder for checkpoints, the steps of the training go on from cell to cell
        output = kernel.run(TRAIN.format(flags=f"--checkpoint {tmp_path}", epochs=1))
        assert output.error is None, output.traceback
    assert facts(kernel)["step"] == 20
    columns = kernel.value(f"[list(table.columns[0]) for key, table in {STATE}.tables.items() if key[0] == 'step']")
    assert columns == [[float(step) for step in range(1, 21)]] * 3
    output = kernel.run(
        TRAIN.format(flags=f"--checkpoint {tmp_path}", epochs=1).replace(
            ").mean()", ").mean() * (float('nan') if len(losses) == 4 else 1)"
        )
    )
    assert output.error is not None
    assert "step 5" in output.error[1]


def test_figures_of_a_run_are_those_of_the_cells_own_lists(kernel: Kernel):
    output = kernel.run(TRAIN.format(flags="", epochs=2))
    assert output.error is None, output.traceback
    shown, losses, times = facts(kernel), kernel.value("losses"), kernel.value("times")
    durations = [after - before for before, after in itertools.pairwise(times)]
    limit = PAUSE_RATIO * statistics.median(durations)  # longer ones are pauses, as another program may cause
    mean_ms = statistics.mean(duration for duration in durations if duration <= limit) * 1e3
    assert shown["step"] == len(losses) == 40
    (own, other) = [rank["step_ms"] for rank in shown["ranks"]]
    assert own == pytest.approx(mean_ms, rel=0.01)
    assert shown["step_ms"] == max(own, other)
    assert shown["samples_per_s"] == pytest.approx(4e3 / own + 4e3 / other, rel=1e-6)
    assert shown["learning_rate"] == 0.01
    (name,) = [loss["name"] for loss in shown["losses"]]
    assert name == "loss"


def test_csv_has_every_step_of_every_curve(kernel: Kernel):
    kernel.run("from accel_nb.ui.csv_export import to_csv")
    text = kernel.value(f"to_csv({STATE})")
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [int(row["step"]) for row in rows] == list(range(1, 41))
    assert not [name for row in rows for name, value in row.items() if value == ""]
    own = kernel.value("losses")
    assert [float(row["loss, rank 0"]) for row in rows] == pytest.approx(own)
    assert [float(row["loss"]) for row in rows] == pytest.approx(
        [(float(row["loss, rank 0"]) + float(row["loss, rank 1"])) / 2 for row in rows]
    )


def test_each_loss_has_a_curve_by_its_variable(kernel: Kernel):
    output = kernel.run(TWO_LOSSES)
    assert output.error is None, output.traceback
    assert [loss["name"] for loss in facts(kernel)["losses"]] == ["d_loss", "g_loss"]
    values = kernel.value(f"[list({STATE}.curve(name).columns[1]) for name in ('d_loss', 'g_loss')]")
    assert [len(column) for column in values] == [20, 20]
    assert max(values[0]) < 100 <= min(values[1])
    rates = kernel.value(f"[{STATE}.curve(name).columns[2][-1] for name in ('d_loss', 'g_loss')]")
    assert rates == [0.01, 0.1]
    assert kernel.value(f"[mark.text for mark in {STATE}.marks if mark.kind == 'begins']") == ["g_loss"]


def test_clipping_has_a_curve_of_the_norm_before_it(kernel: Kernel):
    output = kernel.run("""%%accelerate --cpus 2
norms = []
for inputs, targets in loader:
    loss = ((model(inputs) - targets) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1e-3).item())
    optimizer.step()
""")
    assert output.error is None, output.traceback
    shown = kernel.value(f"[list(column) for column in {STATE}.curve('gradient norm').columns]")
    assert shown == [[float(step) for step in range(1, 21)], pytest.approx(kernel.value("norms"))]


def test_a_second_loop_of_another_model_is_a_curve_of_its_own(kernel: Kernel):
    output = kernel.run("""%%accelerate --cpus 2
for rate in (0.01, 0.1):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), rate)
    for inputs, targets in loader:
        loss = ((model(inputs) - targets) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
""")
    assert output.error is None, output.traceback
    assert [loss["name"] for loss in facts(kernel)["losses"]] == ["loss", "loss (2)"]
    assert kernel.value(f"[mark.x for mark in {STATE}.marks if mark.kind == 'begins']") == [21.0]


def test_a_cell_has_the_number_that_the_notebook_shows(kernel: Kernel):
    output = kernel.run("%%accelerate --cpus 2\nloss = 1 / 0")
    number = kernel.value("len(In) - 2")
    # IPython 7 names the file of a cell.
    assert f"Cell In[{number}], line 2" in output.traceback or version_info < (8, 0)
    kernel.run(TRAIN.format(flags="", epochs=1))
    number = kernel.value("len(In) - 2")
    assert facts(kernel)["title"] == f"cell {number}"


def test_a_comment_ends_the_flags(kernel: Kernel):
    output = kernel.run("%%accelerate --cpus 2  # as many as there are cores\nworld = accelerator.num_processes")
    assert output.error is None, output.traceback
    assert kernel.value("world") == 2


def test_a_cell_says_what_it_waits_for(kernel: Kernel):
    output = kernel.run("%%accelerate --cpus 2\nimport time\ntime.sleep(2.5)\nprint('done')")
    assert any(text.endswith("running, 2 s") for text in output.updates), output.updates
    assert output.receipt.endswith("nothing to prepare")


def test_a_rank_that_is_killed_leaves_no_other_error(kernel: Kernel):
    output = kernel.run("""%%accelerate --cpus 2
import os, signal, time, torch.distributed as dist
if accelerator.process_index == 1:
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
""")
    assert output.error is not None
    assert "SIGKILL" in output.error[1]
    assert not re.search("KeyboardInterrupt", output.stderr + output.stdout)


VALIDATED = """%%accelerate --cpus 2 {flags}
def evaluate(part):
    model.eval()
    with torch.no_grad():
        for inputs, targets in part:
            val_loss = ((model(inputs) - targets) ** 2).mean()
    model.train()

means, others = [], []
for epoch in range(3):
    for inputs, targets in loader:
        loss = ((model(inputs) - targets) ** 2).mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
    with torch.no_grad():
        total = 0
        for inputs, targets in held_out:  # the last batch has fewer samples
            loss = ((model(inputs) - targets) ** 2).mean()
            total += loss * len(inputs)
        means.append(total.item() / 50)
    evaluate(held_out)
    with torch.no_grad():
        others.append(((model(x[:50]) - x[:50].sum(1, keepdim=True)) ** 2).mean().item())
"""


@pytest.mark.parametrize("flags", ["", "--divide data"])
def test_a_loop_that_does_not_train_has_the_curve_of_its_loss(kernel: Kernel, flags: str):
    kernel.run("held_out = DataLoader(TensorDataset(x[:50], x[:50].sum(1, keepdim=True)), 16)")
    output = kernel.run(VALIDATED.format(flags=flags))
    assert output.error is None, output.traceback
    curves = kernel.value(
        f"{{name: [list(c) for c in table.columns] for name, table in {STATE}.validation_losses('loss').items()}}"
    )
    (first, second) = curves.items()
    assert (first[0], second[0]) == ("validation loss", "validation loss (2)")
    assert first[1] == [[20.0, 40.0, 60.0], pytest.approx(kernel.value("means"), rel=1e-5)]
    assert second[1] == [[20.0, 40.0, 60.0], pytest.approx(kernel.value("others"), rel=1e-5)]


@pytest.mark.parametrize(
    "body",
    [
        "loss += ((model(inputs) - targets) ** 2).mean()",  # a sum of the losses
        "loss = loss + ((model(inputs) - targets) ** 2).mean()",
        "other = ((model(inputs) - targets) ** 2).mean()",  # the loss is that of training
        "loss = ((model(inputs) - targets) ** 2)",
    ],
)
def test_a_variable_that_is_not_the_loss_of_a_batch_has_no_curve(kernel: Kernel, body: str):
    output = kernel.run(f"""%%accelerate --cpus 2
for inputs, targets in loader:
    loss = ((model(inputs) - targets) ** 2).mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
with torch.no_grad():
    for inputs, targets in held_out:
        {body}
""")
    assert output.error is None, output.traceback
    assert facts(kernel)["step"] == 20
    assert facts(kernel)["metrics"] == []
