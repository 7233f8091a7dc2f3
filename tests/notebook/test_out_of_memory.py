"""A worker's memory runs out under a real limit of the system: who held it, and what would fit. The pool goes on."""

from __future__ import annotations

import pytest

from tests.notebook.test_cells import done, run
from tests.notebook.test_state import setup

MODEL = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 2048), nn.Linear(2048, 64)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

model = nn.Sequential(*[Block() for _ in range(8)], nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
loader = DataLoader(TensorDataset(torch.randn(8192, 64), torch.zeros(8192, 1)), batch_size=8192)
"""

LIMIT = """import resource
used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 320 * 2**20, resource.RLIM_INFINITY))
"""

TRAIN = """for x, y in loader:
    loss = (model(x) - y).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""

LEAK = """kept = []
while True:
    kept.append(torch.ones(2**22))
"""


@pytest.fixture(autouse=True)
def next_cell_works(kernel):
    setup(kernel, MODEL)
    pids = done(kernel, "import os\npid = os.getpid()")
    yield pids
    free = "import resource\nresource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))\n"
    before = kernel.value("pid")
    done(kernel, f"{free}import os\npid = os.getpid()\n{TRAIN}")
    assert kernel.value("pid") == before, "the workers are the same ones"


def test_a_step_that_does_not_fit_is_explained(kernel):
    output = run(kernel, LIMIT + TRAIN)
    assert output.error is not None
    assert output.error[0] == "RuntimeError"
    told = output.traceback
    assert "can't allocate memory" in told
    at = told.index("Memory of rank")
    lines = told[at:].splitlines()
    assert "64.0 MiB were asked for" in lines[0] or "32.0 MiB were asked for" in lines[0], lines[0]
    assert "line 7: loss.backward()" in told[at:]
    assert "parameters" in told[at:]
    assert "activations" in told[at:]
    assert "kept for the backward pass behind *.up" in told[at:]
    assert "and --accumulate" in told[at:], told[at:]
    assert "--activation-checkpointing" in told[at:]
    fits = [line for line in lines if " fits " in line]
    assert any("--accumulate" in line for line in fits), told[at:]


def test_the_module_that_asked_is_named(kernel):
    output = run(kernel, LIMIT.replace("320", "200") + TRAIN)
    told = output.traceback[output.traceback.index("Memory of rank") :]
    assert "of forward: return x + self.down(torch.relu(self.up(x)))" in told
    assert "up (Linear)" in told or "(Block)" in told


def test_what_a_cell_piles_up_is_named_with_its_line(kernel):
    output = run(kernel, LIMIT + LEAK)
    assert output.error is not None
    told = output.traceback[output.traceback.index("Memory of rank") :]
    assert "16.0 MiB were asked for" in told
    assert "`kept (line 7)`" in told
    assert "line 7: kept.append(torch.ones(2**22))" in told
    done(kernel, "del kept")


def test_what_is_advised_fits(kernel):
    """The same training under the same limit, with the batch and the flag that the post-mortem names."""
    told = run(kernel, LIMIT + TRAIN).traceback
    (advice,) = [line for line in told.splitlines() if "--accumulate" in line]
    batch, parts = advice.split("batch_size=")[1].split()[0], advice.split("--accumulate ")[1].split(",")[0]
    kernel.run(f"loader = DataLoader(loader.dataset, batch_size={batch})")
    done(kernel, f"{TRAIN}", f"--cpus 2 --accumulate {parts}")
