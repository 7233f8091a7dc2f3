"""Cells in a real kernel, whose worker trains through PyTorch/XLA."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.kernel import Kernel, running_kernel

SET_UP = """
import torch, torch.nn as nn, torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset, random_split
torch.manual_seed(0)
pixels, digits = load_digits(return_X_y=True)
dataset = TensorDataset(torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(digits))
train_set, test_set = random_split(dataset, [1437, 360])
loader = DataLoader(train_set, batch_size=64, shuffle=True)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
losses = []
"""
TRAIN = """
for epoch in range({epochs}):
    for images, labels in loader:
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(f"epoch {{epoch}} loss {{losses[-1]:.3f}}")
"""
ACCURACY = """
with torch.no_grad():
    accuracy = (model(test_set[:][0]).argmax(1) == test_set[:][1]).float().mean().item()
"""


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    with running_kernel() as kernel:
        assert kernel.run("%load_ext accel_nb").error is None
        yield kernel


def test_the_model_that_a_plain_cell_trains_comes_back(kernel: Kernel) -> None:
    assert kernel.run(SET_UP).error is None
    output = kernel.run("%%accelerate --strategy xla" + TRAIN.format(epochs=6), timeout_s=110)
    assert output.error is None, output.traceback
    assert "xla" in output.receipt
    assert "chips 4 x CPU" in output.receipt
    assert "epoch 5" in output.stdout
    kernel.run(ACCURACY)
    assert kernel.value("accuracy") > 0.9
    assert kernel.value("(str(model[0].weight.device), model[0].weight.requires_grad)") == ("cpu", True)
    # Nothing of torch_xla is in the kernel, and it goes on with the model and the optimizer by itself.
    assert kernel.value("'torch_xla' in __import__('sys').modules") is False
    here = kernel.run(TRAIN.format(epochs=1))
    assert here.error is None, here.traceback


def test_the_next_cell_goes_on_where_the_notebook_is(kernel: Kernel) -> None:
    before = kernel.value("len(losses)")
    output = kernel.run("%%accelerate --strategy xla --precision bf16" + TRAIN.format(epochs=1), timeout_s=110)
    assert output.error is None, output.traceback
    assert "bf16" in output.receipt
    assert kernel.value("len(losses)") == before + 23
    assert kernel.value("max(losses[-23:]) < losses[0] / 2") is True
