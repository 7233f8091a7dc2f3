"""Loops of shapes that people write, run plainly and on two workers in a kernel: the results are equal."""

from __future__ import annotations

import pytest

from tests.notebook.cells import STATE, done, run, setup
from tests.support.kernel import Kernel

SETUP = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
X, Y = torch.randn(22, 3).double(), torch.randn(22, 1).double()
loader = DataLoader(TensorDataset(X, Y), batch_size=6, shuffle=True, generator=torch.Generator().manual_seed(4))
def build():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
def total(model):
    return sum(value.sum().item() for value in model.parameters())
"""

WITHOUT_LOADER = {
    "a model made in a function": """
def train(num_steps):
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(num_steps):
        loss = F.mse_loss(model(X), Y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return total(model)
result = train(3)
""",
    "models made in a loop": """
result = 0.0
for rate in (0.1, 0.3):
    inner = build()
    optimizer = torch.optim.Adam(inner.parameters(), lr=rate)
    for _ in range(2):
        loss = F.mse_loss(inner(X), Y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    result += total(inner)
""",
    "a model made on a branch": """
if result is None:
    branch = build()
    optimizer = torch.optim.SGD(branch.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        F.mse_loss(branch(X), Y).backward()
        optimizer.step()
        optimizer.zero_grad()
    result = total(branch)
""",
    "tensors": """
image = torch.ones(4, 3, dtype=torch.float64, requires_grad=True)
fixed = build()
optimizer = torch.optim.Adam([image], lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    (fixed(image) - 2).pow(2).mean().backward()
    optimizer.step()
result = image.sum().item()
""",
}

READ_WHOLE = {
    "tensors with a loader": """
w = torch.zeros(3, 1, dtype=torch.float64, requires_grad=True)
b = torch.zeros(1, dtype=torch.float64, requires_grad=True)
optimizer = torch.optim.SGD([w, b], lr=0.1)
for _ in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        (x @ w + b - y).pow(2).mean().backward()
        optimizer.step()
result = w.sum().item() + b.item()
""",
    "a tensor beside a model": """
beside = build()
scale = torch.ones(1, dtype=torch.float64, requires_grad=True)
optimizer = torch.optim.SGD([*beside.parameters(), scale], lr=0.1)
for x, y in loader:
    optimizer.zero_grad()
    F.mse_loss(beside(x) * scale, y).backward()
    optimizer.step()
result = total(beside) + scale.item()
""",
    "a loader without batches": """
sequences = DataLoader([torch.full((6, 3), float(i), dtype=torch.float64) for i in range(4)], batch_size=None)
reader = build()
optimizer = torch.optim.SGD(reader.parameters(), lr=0.05)
for sequence in sequences:
    assert sequence.shape == (6, 3)
    optimizer.zero_grad()
    reader(sequence).cumsum(0).pow(2).mean().backward()
    optimizer.step()
result = total(reader)
""",
}

EVALUATING = """
for epoch in range(3):
    for x, y in loader:
        optimizer.zero_grad()
        F.mse_loss(evaluated(x), y).backward()
        optimizer.step()
result = total(evaluated)
"""


def on_one_device(kernel: Kernel, cell: str) -> float:
    output = kernel.run(SETUP + "result = None\n" + cell)
    assert output.error is None, output.traceback
    value = kernel.value("result")
    output = kernel.run(SETUP + "result = None")
    assert output.error is None, output.traceback
    return value


@pytest.mark.parametrize("name", WITHOUT_LOADER)
def test_what_trains_without_a_loader_is_trained_as_on_one_device(name: str, kernel: Kernel) -> None:
    expected = on_one_device(kernel, WITHOUT_LOADER[name])
    done(kernel, WITHOUT_LOADER[name])
    assert kernel.value("result") == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("name", READ_WHOLE)
def test_a_loader_that_cannot_be_divided_is_read_whole_and_the_receipt_says_so(name: str, kernel: Kernel) -> None:
    expected = on_one_device(kernel, READ_WHOLE[name])
    output = done(kernel, READ_WHOLE[name])
    assert kernel.value("result") == pytest.approx(expected, abs=1e-9)
    assert ("no batch size" if name == "a loader without batches" else "read whole by every worker") in output.receipt


def test_a_model_with_buffers_is_divided(kernel: Kernel) -> None:
    output = kernel.run(SETUP + "normed = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()")
    assert output.error is None, output.traceback
    loop = "optimizer = torch.optim.SGD(normed.parameters(), lr=0.1)" + EVALUATING.replace("evaluated", "normed")
    assert "batch 6 = 2 x 3 rows in Sequential" in done(kernel, loop).receipt


def test_a_loop_that_trains_in_evaluation_mode_is_divided(kernel: Kernel) -> None:
    start = "evaluated = build().eval()\noptimizer = torch.optim.SGD(evaluated.parameters(), lr=0.1)"
    expected = on_one_device(kernel, start + EVALUATING)
    kernel.run(start)
    output = done(kernel, EVALUATING)
    assert kernel.value("result") == pytest.approx(expected, abs=1e-9)
    assert "batch 6 = 2 x 3 rows in Sequential" in output.receipt
    assert output.stderr == ""


def test_an_evaluation_in_a_function_that_can_train_counts_every_sample(kernel: Kernel) -> None:
    cell = """
def run_epoch(training):
    both.train(training)
    seen, summed = 0, 0.0
    for x, y in loader:
        loss = F.mse_loss(both(x), y)
        if training:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        seen += len(x)
        summed += loss.item() * len(x)
    return seen, summed
both = build()
optimizer = torch.optim.SGD(both.parameters(), lr=0.1)
run_epoch(True)
counted, summed = run_epoch(False)
result = summed
"""
    expected = on_one_device(kernel, cell)
    done(kernel, cell)
    assert kernel.value("counted") == 22
    assert kernel.value("result") == pytest.approx(expected, abs=1e-9)


def test_an_error_of_a_share_says_that_the_batch_was_divided(kernel: Kernel) -> None:
    kernel.run(SETUP + "model = build()\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)")
    loop = "for x, y in loader:\n    (model(x) + torch.zeros(len(x), 1)).mean().backward()\n    optimizer.step()"
    done(kernel, loop.replace("len(x)", "6 if len(x) == 6 else len(x)"))
    output = run(kernel, loop.replace("len(x)", "6"), "--cpus 2 --divide data")
    assert output.error is not None
    assert output.error[0] == "RuntimeError"
    assert "the batch was divided: this worker had 3 of its 6 samples" in output.traceback
    output = run(kernel, "raise RuntimeError('of my own')")
    assert "divided" not in output.traceback


def test_a_plain_cell_has_its_own_options_beside_an_open_accelerator(kernel: Kernel) -> None:
    kernel.run(SETUP + "model = build()\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)")
    done(kernel, "from accel_nb import Accelerator\nown = Accelerator()\nown.prepare(torch.nn.Linear(2, 1))")
    loop = "for x, y in loader:\n    (model(x) + torch.zeros(6, 1)).mean().backward()\n    optimizer.step()"
    output = run(kernel, loop, "--cpus 2 --divide data")
    assert "the batch was divided: this worker had 3 of its 6 samples" in output.traceback
    run(kernel, "del own")


def test_steps_count_from_one_in_each_cell(kernel: Kernel) -> None:
    kernel.run(SETUP + "model = build()\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)")
    loop = "for x, y in loader:\n    (model(x).mean() * {factor}).backward()\n    optimizer.step()\n"
    done(kernel, loop.format(factor="1"))
    output = run(kernel, loop.format(factor="float('nan')"))
    assert output.error is not None
    assert output.error[0] == "NanLossError"
    assert "the loss of step 1 is NaN" in output.error[1]


@pytest.mark.parametrize("flags", ["", "--strategy fsdp"])
def test_models_that_a_loop_makes_are_freed_and_each_has_a_curve(kernel: Kernel, flags: str) -> None:
    setup(kernel, _FOLDS)
    body = "import gc\ngc.disable()\nseen = []\nnum_alive = [train_fold(seen) for _ in range(6)]\ngc.enable()\ndel seen"
    output = done(kernel, body, f"--cpus 2 {flags}")
    # The model of the fold before is released when the next optimizer is made.
    assert kernel.value("num_alive") == [1, 1, 1, 1, 1, 1]
    assert any("24 steps, loss" in text for text in output.texts), output.texts
    assert kernel.value(f"{STATE}.loss_names") == ["", *(f"loss ({number})" for number in range(2, 7))]


_FOLDS = """
import weakref, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
folds = TensorDataset(torch.randn(32, 3), torch.randn(32, 1))
def train_fold(seen):
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    seen.append(weakref.ref(net))
    optimizer = torch.optim.AdamW(net.parameters())
    for x, y in DataLoader(folds, batch_size=8, shuffle=True):
        optimizer.zero_grad()
        (net(x) - y).square().mean().backward()
        optimizer.step()
    return sum(reference() is not None for reference in seen)
"""


def test_an_optimizer_that_steps_in_a_hook_trains_as_on_one_device(kernel: Kernel) -> None:
    cell = """
model = build()
optimizers = {value: torch.optim.SGD([value], lr=0.1) for value in model.parameters()}
def step(value):
    optimizers[value].step()
    optimizers[value].zero_grad()
for value in model.parameters():
    value.register_post_accumulate_grad_hook(step)
for x, y in loader:
    F.mse_loss(model(x), y).backward()
result = [value.detach().sum().item() for value in model.parameters()]
"""
    expected = on_one_device(kernel, cell)
    output = done(kernel, cell)
    assert kernel.value("result") == pytest.approx(expected, abs=1e-9)
    assert "hooks read or change its values" in output.receipt
    output = run(kernel, cell, "--cpus 2 --divide data")
    assert output.error is not None
    assert output.error[0] == "MisuseError"
    assert "inside of the backward pass" in output.error[1]
    assert "accelerator.backward" not in output.traceback


ACCUMULATED = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Linear(3, 2).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
batches = [torch.randn(4, 3, dtype=torch.float64) for _ in range(4)]
"""


@pytest.mark.parametrize("number", [4, 3])
def test_gradients_of_a_closed_window_come_back(kernel: Kernel, number: int) -> None:
    setup(kernel, ACCUMULATED)
    body = "optimizer.zero_grad(); model(x).square().mean().backward(); optimizer.step()"
    output = done(kernel, f"for x in batches[:{number}]:\n    {body}", "--cpus 2 --accumulate 2")
    if number == 3:  # the last window is open
        assert kernel.value("model.weight.grad is None")
        assert "the gradients of its models stay on the workers" in output.stderr
        return
    check_gradient_of_window(kernel)


def check_gradient_of_window(kernel: Kernel) -> None:
    """Check that the notebook has the gradient of the last two of the batches."""
    setup(kernel, "found, model.weight.grad = model.weight.grad, None")
    setup(kernel, "for x in batches[2:]:\n    (model(x).square().mean() / 2).backward()")
    assert kernel.value("(found - model.weight.grad).abs().max().item()") < 1e-12


def test_gradients_come_back_beside_a_model_whose_gradients_deepspeed_holds(kernel: Kernel) -> None:
    setup(kernel, f"{ACCUMULATED}held = model.float()\nheld_optimizer = optimizer")
    step = "accelerator.backward(held(torch.ones(4, 3)).sum())\nheld_optimizer.step()"
    prepare = "held, held_optimizer = accelerator.prepare(held, held_optimizer)"
    done(kernel, f"{prepare}\n{step}", "--cpus 2 --strategy deepspeed")
    setup(kernel, ACCUMULATED)
    body = "optimizer.zero_grad(); model(x).square().mean().backward(); optimizer.step()"
    done(kernel, f"for x in batches:\n    {body}", "--cpus 2 --accumulate 2")
    check_gradient_of_window(kernel)


FAILING = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Linear(3, 2).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = [torch.randn(4, 3, dtype=torch.float64) for _ in range(4)]
weights = []
def train(batches, failing=None):
    for number, x in enumerate(batches):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        if number == failing:
            raise ValueError("wrong")
"""


@pytest.mark.parametrize("cause", ["every rank", "one rank"])
def test_a_cell_after_an_error_begins_a_new_accumulation_window(kernel: Kernel, cause: str) -> None:
    setup(kernel, FAILING)
    line = "--cpus 2 --accumulate 2"
    done(kernel, "train(batches[:2])", line)
    failing = "2" if cause == "every rank" else "None"
    error = "" if cause == "every rank" else "\nimport os\nif os.environ['RANK'] == '1':\n    raise ValueError('wrong')"
    assert run(kernel, f"train(batches[:3], {failing}){error}", line).error is not None
    setup(kernel, "weights = [value.detach().clone() for value in model.parameters()]")
    output = done(kernel, "train(batches[2:])", line)
    assert "begins a new one" in " ".join(output.texts)
    expected = """
[a.requires_grad_() for a in weights]
(sum((x @ weights[0].T + weights[1]).square().mean() for x in batches[2:]) / 2).backward()
max((value - (a - 0.1 * a.grad)).abs().max().item() for value, a in zip(model.parameters(), weights))
"""
    setup(kernel, "\n".join(expected.strip().splitlines()[:-1]))
    assert kernel.value(expected.strip().splitlines()[-1]) < 1e-12
    assert "begins a new one" not in " ".join(done(kernel, "train(batches[2:])", line).texts)
