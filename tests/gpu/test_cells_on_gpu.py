"""The main job on real devices; needs at least one CUDA device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from accel_nb.runtime.devices.registry import device_type
from tests.support.kernel import Kernel, running_kernel

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SETUP = """
import torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
x = torch.randn(512, 16); y = (x[:, 0] > 0).long()
loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True, pin_memory=True)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
losses = []
"""

TRAIN = """
for epoch in range(5):
    for inputs, targets in loader:
        inputs, targets = inputs.to("cuda"), targets.to("cuda")
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
"""


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    with running_kernel() as kernel:
        assert kernel.run("%load_ext accel_nb").error is None
        yield kernel


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16", "auto"])
def test_a_plain_cell_trains_on_every_gpu_and_the_weights_come_back(kernel: Kernel, precision: str) -> None:
    assert kernel.run(SETUP).error is None
    output = kernel.run(f"%%accelerate --gpus all --precision {precision}\n{TRAIN}", timeout_s=120)
    assert output.error is None, output.traceback
    assert "cuda:0" in output.receipt
    assert kernel.value("losses[0] > 2 * losses[-1]") is True
    assert kernel.value("str(model[0].weight.device)") == "cpu"
    accuracy = kernel.value("float((model(x).argmax(1) == y).float().mean())")
    assert accuracy > 0.9


def test_the_kernel_makes_no_device_context(kernel: Kernel) -> None:
    assert kernel.value("torch.cuda.is_initialized()") is False


def test_the_kernel_may_hold_a_device_context(kernel: Kernel) -> None:
    assert kernel.run("held = torch.ones(1, device='cuda')").error is None
    assert kernel.run(SETUP).error is None
    output = kernel.run(f"%%accelerate --gpus all\n{TRAIN}", timeout_s=120)
    assert output.error is None, output.traceback


def test_sensors_of_a_gpu_are_read() -> None:
    measured = device_type("cuda:0").load("cuda:0")
    assert 0 <= measured["GPU utilization (%)"] <= 100
    assert 0 < measured["GPU power (W)"] < 2000
    assert 0 < measured["GPU temperature (C)"] < 120
