"""Cells that tests of several nodes run, and the processes of a node."""

from __future__ import annotations

import psutil

from tests.support.kernel import Kernel

DATA = """
import torch
from torch.utils.data import DataLoader, TensorDataset
def make():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
    inputs, targets = torch.randn(64, 8), torch.randint(0, 2, (64,))
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=16, shuffle=True)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01), loader
"""


TRAIN = """
for epoch in range(2):
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
"""


SLEEP = "import time\nfor _ in range(600):\n    print('waiting', flush=True)\n    time.sleep(0.1)"


def run(kernel: Kernel, code: str, **options: str) -> str:
    output = kernel.run(code, timeout_s=120, **options)  # type: ignore[arg-type]
    assert output.error is None, output.traceback
    return output.stdout


def pids_of(kernel: Kernel) -> list[int]:
    lines = run(kernel, "%accelerate status").splitlines()
    return [int(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("rank ")]


def host_of(pid: int) -> psutil.Process:
    zygote = psutil.Process(pid).parent()
    assert zygote is not None
    host = zygote.parent()
    assert host is not None
    return host
