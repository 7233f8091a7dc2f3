"""Whole models that a plain cell saves, copies and loads: classes and functions of earlier cells are found by name."""

from __future__ import annotations

import pytest

from tests.notebook.cells import setup

EARLIER = """
import copy, os, pickle, tempfile
import torch
from torch import nn

def twice(x):
    return 2 * x

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.act = nn.Linear(3, 3), twice

    def forward(self, x):
        return self.act(self.layer(x))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(Block(), Block())

    def forward(self, x):
        return self.body(x).sum(1)

torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.randn(8, 3)
folder = tempfile.mkdtemp()
"""

CELL = """%%accelerate --cpus 2
for _ in range(2):
    model(data).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    with open(os.path.join(folder, "model.pt"), "wb") as file:
        torch.save(model, file)
torch.save(model, f"{folder}/again.pt")
loaded = torch.load(f"{folder}/model.pt", weights_only=False)
copies = [loaded, pickle.loads(pickle.dumps(model)), copy.deepcopy(model)]
plain = [type(item).__name__ == "Net" and type(item.body[0]).__name__ == "Block" for item in copies]
equal = [torch.equal(item(data), model(data)) for item in copies]
every = [None] * 2
torch.distributed.all_gather_object(every, (plain, equal))
del loaded, copies
"""


@pytest.mark.parametrize("change", ["pass", EARLIER.replace("nn.Linear(3, 3)", "nn.Linear(3, 3, bias=False)")])
def test_a_model_whose_class_no_name_of_the_cell_leads_to_is_saved_whole(kernel, change):
    setup(kernel, EARLIER)
    setup(kernel, CELL)
    setup(kernel, change)
    setup(kernel, CELL)
    assert kernel.value("every") == [([True] * 3, [True] * 3)] * 2
    assert kernel.value("sorted(os.listdir(folder))") == ["again.pt", "model.pt"]
    setup(
        kernel,
        "allowed = [Net, Block, twice, nn.Sequential, nn.Linear]\n"
        "with torch.serialization.safe_globals(allowed):\n"
        "    loaded = [torch.load(f'{folder}/{name}.pt', weights_only=True) for name in ('model', 'again')]",
    )
    assert kernel.value("[type(item) is Net and torch.equal(item(data), model(data)) for item in loaded]") == [True] * 2


@pytest.mark.parametrize(
    "make", ["tempfile.mkdtemp()", "multiprocessing.get_context('fork').Pool(1).apply(tempfile.mkdtemp)"]
)
def test_temporary_folders_of_other_ranks_are_removed_with_the_workers(kernel, make):
    cell = f"import multiprocessing, os, tempfile\nmade = {make}\nprint(made)\n"
    other = kernel.run(f"%%accelerate --cpus 2 --no-panel --show-ranks all\n{cell}").stdout.partition("[rank 1] ")[2]
    folder = other.splitlines()[0]
    kept = kernel.run(f"import os, shutil\nprint(os.path.isdir(made), os.path.isdir({folder!r}))")
    assert kept.stdout == "True True\n", kept.stdout
    kernel.run("%accelerate stop")
    left = kernel.run(f"print(os.path.isdir(made), os.path.isdir(os.path.dirname({folder!r})))\nshutil.rmtree(made)")
    assert left.stdout == "True False\n", left.stdout
