"""Models that no name leads to directly, and what is kept on them, in real cells."""

from __future__ import annotations

import pytest

from tests.notebook.cells import done, setup

MAKE = """
import functools, torch
torch.manual_seed(0)
def make(model, optimizer, losses):
    def step(x):
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return step
def build():
    net = torch.nn.Linear(2, 1)
    return net, torch.optim.SGD(net.parameters(), lr=0.1), []
class Trainer:
    def __init__(self, net, optimizer, losses):
        self.net, self.optimizer, self.losses = net, optimizer, losses
    def fit(self, x):
        make(self.net, self.optimizer, self.losses)(x)
def train(net, optimizer, losses, x):
    make(net, optimizer, losses)(x)
held = {'parts': build()}
data = torch.ones(4, 2)
"""


@pytest.mark.parametrize(
    "made",
    ["make(*held['parts'])", "functools.partial(train, *held['parts'])", "Trainer(*held['parts']).fit"],
)
def test_a_model_that_only_a_callable_leads_to_is_trained_here_too(kernel, made):
    setup(kernel, MAKE + f"step = {made}\nnet, losses = held['parts'][0], held['parts'][2]")
    setup(kernel, "import copy\ntwin, before = copy.deepcopy(net), []\ndel held")
    setup(kernel, "hidden = lambda net=net: net\ndel net")
    setup(kernel, "other = make(twin, torch.optim.SGD(twin.parameters(), lr=0.1), before)\nother(data); other(data)")
    for _ in range(2):
        done(kernel, "step(data)")
    assert kernel.value("(losses == before, bool(torch.allclose(hidden().weight, twin.weight)))") == (True, True)
    setup(kernel, "with torch.no_grad(): hidden().weight.zero_(); hidden().bias.zero_()")
    done(kernel, "step(data)")
    assert kernel.value("losses[-1]") == 0.0


def test_what_a_model_keeps_on_itself_comes_back(kernel):
    setup(
        kernel,
        "import torch\nclass Net(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.layer, self.losses, self.calls = torch.nn.Linear(2, 1), [], 0\n"
        "    def forward(self, x):\n        self.calls += 1\n        return self.layer(x)\n"
        "model = Net()\nlosses, same = model.losses, model\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "x = torch.ones(4, 2)",
    )
    body = (
        "loss = model(x).pow(2).mean()\nloss.backward()\noptimizer.step()\noptimizer.zero_grad()\n"
        "model.losses.append(loss.item())"
    )
    for _ in range(2):
        done(kernel, body)
    assert kernel.value("(same is model, losses is model.losses, len(losses), model.calls)") == (True, True, 2, 2)
    setup(kernel, "model.losses.clear()\nmodel.calls = 10")
    done(kernel, body)
    assert kernel.value("(len(losses), model.calls)") == (1, 11)


def test_a_model_that_comes_back_as_a_new_object_is_reported(kernel):
    """Sharded weights cannot be set in a model whose layer has another class than before."""
    setup(
        kernel,
        "import torch\nfrom torch.nn.utils.parametrizations import weight_norm\ntorch.manual_seed(0)\n"
        "model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 1))\nheld = [model]\n"
        "x = torch.ones(4, 2)",
    )
    output = done(
        kernel,
        "weight_norm(model[1])\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "model(x).pow(2).mean().backward()\noptimizer.step()",
        flags="--cpus 2 --strategy fsdp",
    )
    assert kernel.value("(model is held[0], torch.nn.utils.parametrize.is_parametrized(model[1]))") == (False, True)
    assert any(text.startswith("model is a new object") for text in output.texts)


def test_an_object_comes_back_without_an_attribute_that_cannot_be_copied(kernel):
    setup(
        kernel,
        "class Reader:\n"
        "    def __init__(self): self.items, self.seen, self.rate = (n for n in range(9)), [], 1\n"
        "    def read(self): self.seen.append(next(self.items) * self.rate)",
    )
    output = done(kernel, "reader = Reader()\nreader.read()\nreader.read()")
    assert "stayed on the workers: reader.items (generator cannot be copied)" in output.texts[-1]
    assert kernel.value("(reader.seen, hasattr(reader, 'items'))") == ([0, 1], False)
    setup(kernel, "reader.rate, reader.note = 10, 'new'")
    done(kernel, "reader.read()\ndel reader.note")
    assert kernel.value("(reader.seen, hasattr(reader, 'note'))") == ([0, 1, 20], False)
