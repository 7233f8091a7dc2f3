"""A training on digits, as a plain and as an explicit cell, and its weights."""

from __future__ import annotations

from tests.notebook.cells import run

SETUP = """
import torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(7)
X = torch.randn({num_samples}, 6, dtype=torch.float64)
Y = torch.randint(0, 3, ({num_samples},))
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
loader = DataLoader(TensorDataset(X, Y), batch_size=8, shuffle=True)
"""


PLAIN = """
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
"""


EXPLICIT = """
model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
for epoch in range(2):
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
"""


KEEP = """
{name} = [parameter.detach().clone() for parameter in model.parameters()]
{name}_draw = float(torch.rand(1))
{name}_rate = optimizer.param_groups[0]['lr']
"""


def weights(kernel, name: str, setup: str, body: str, flags: str | None) -> None:
    """Set up, train, and keep weights, learning rate and the next random number under ``name``."""
    output = kernel.run(setup)
    assert output.error is None, output.traceback
    output = kernel.run(body) if flags is None else run(kernel, body, flags)
    assert output.error is None, output.traceback
    assert output.stderr == ""
    output = kernel.run(KEEP.format(name=name))
    assert output.error is None, output.traceback


def assert_equal(kernel) -> None:
    difference = kernel.value("max(float((a - b).abs().max()) for a, b in zip(one, many))")
    assert difference < 1e-9
    assert kernel.value("one_rate == many_rate")
