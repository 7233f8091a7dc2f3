"""Cells that train a model of which each worker holds a shard: the notebook's model is whole, and the trained one."""

from __future__ import annotations

import pytest

from tests.notebook.cells import done, run
from tests.notebook.digits_training import EXPLICIT, KEEP, PLAIN, SETUP, assert_equal, weights

FLAGS = "--cpus 2 --strategy fsdp"
DATA = SETUP.format(num_samples=21)
CLASS = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.tensor(1.0))
    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(x) * self.scale
"""
MADE = DATA.replace("nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))", "Net()")


@pytest.mark.parametrize(("body", "flags"), [(PLAIN, FLAGS), (EXPLICIT, f"{FLAGS} --batch global")])
def test_a_cell_trains_as_on_one_process(kernel, body: str, flags: str) -> None:
    weights(kernel, "one", DATA, PLAIN, None)
    weights(kernel, "many", DATA, body, flags)
    assert_equal(kernel)


def test_training_goes_on_in_the_next_cell_after_the_notebook_changed_something(kernel) -> None:
    change = "with torch.no_grad():\n    model[0].weight.mul_(0.5)\noptimizer.param_groups[0]['lr'] = 0.01\n"
    schedule = "scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)\n"
    weights(kernel, "one", DATA, PLAIN + change + schedule + PLAIN, None)
    assert kernel.run(DATA).error is None
    done(kernel, PLAIN, FLAGS)
    assert kernel.run(change + schedule).error is None
    done(kernel, PLAIN, FLAGS)
    assert kernel.run(KEEP.format(name="many")).error is None
    assert_equal(kernel)


def test_a_model_that_the_cell_makes_comes_back_whole(kernel) -> None:
    assert kernel.run("import torch.nn as nn, torch\n" + CLASS).error is None
    weights(kernel, "one", "pass", MADE + PLAIN, None)
    kernel.run("del model, optimizer, scheduler, loader, X, Y")
    output = done(kernel, MADE + PLAIN, FLAGS)
    assert "fsdp" in output.receipt
    assert kernel.run(KEEP.format(name="many")).error is None
    assert_equal(kernel)
    assert kernel.value("(type(model) is Net, model.scale.shape == ())") == (True, True)
    assert kernel.value("all(a is b for a, b in zip(model.parameters(), optimizer.param_groups[0]['params']))")
    assert kernel.value("len(optimizer.state) == len(list(model.parameters()))")
    assert kernel.value("[list(vars(part)) == list(vars(Net().double())) for part in [model]]") == [True]
    weights(kernel, "one", "pass", PLAIN, None)  # the notebook trains it on by itself


def test_states_and_copies_are_whole_in_a_plain_cell(kernel, tmp_path) -> None:
    keep = f"""
import copy
best = copy.deepcopy(model.state_dict())
twin = copy.deepcopy(model)
torch.save(model.state_dict(), {str(tmp_path / "weights.pt")!r})
model.load_state_dict(best)
"""
    assert kernel.run(DATA).error is None
    done(kernel, PLAIN + keep, FLAGS)
    for found in ("best", f"torch.load({str(tmp_path / 'weights.pt')!r})", "twin.state_dict()"):
        assert kernel.value(f"all(torch.equal(v, {found}[n]) for n, v in model.state_dict().items())"), found


def test_an_interrupted_cell_loses_no_weights(kernel) -> None:
    assert kernel.run(DATA + "before = model[0].weight.detach().clone()").error is None
    endless = PLAIN + "print('go', flush=True)\nwhile True:\n" + "    for x, y in loader: model(x).sum()\n"
    output = run(kernel, endless, FLAGS, interrupt_on="go")
    assert output.error is not None
    assert any("the next cell returns them" in text for text in output.texts)
    assert kernel.value("torch.equal(model[0].weight, before)")
    assert "True" in done(kernel, "print(model[0].weight.shape == (16, 6))", FLAGS).stdout
    assert not kernel.value("torch.equal(model[0].weight, before)")
    done(kernel, PLAIN, FLAGS)


def test_an_interrupt_in_the_forward_pass_of_one_rank_loses_no_weights(kernel) -> None:
    waiting = (
        "class Waiting(nn.Module):\n"
        "    is_waiting = False\n"
        "    def forward(self, x):\n"
        "        while self.is_waiting and accelerator.process_index == 1: pass\n"
        "        return x\n"
        "model.append(Waiting())\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"  # without state: only the parameters are sharded
        "before = model[0].weight.detach().clone()"
    )
    stuck = (
        "accelerator.prepare(model, optimizer, loader)\n"
        "for x, y in loader:\n"
        "    accelerator.backward(F.cross_entropy(model(x), y))\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
        "model[-1].is_waiting = True\n"
        "print('go', flush=True)\n"
        "model(x)\n"
        "while True: pass\n"
    )
    assert kernel.run(f"{DATA}\n{waiting}").error is None
    output = run(kernel, stuck, f"{FLAGS} --batch global", interrupt_on="go")
    assert output.error is not None
    assert output.error[0] == "KeyboardInterrupt"
    assert "did not stop" not in output.traceback
    done(kernel, "print(model[0].weight.shape)", FLAGS)
    assert not kernel.value("torch.equal(model[0].weight, before)")
    assert kernel.run("model[-1].is_waiting = False").error is None
    done(kernel, PLAIN, FLAGS)


def test_a_cell_that_fails_keeps_its_weights_until_they_are_asked_for(kernel) -> None:
    assert kernel.run(DATA + "before = model[0].weight.detach().clone()").error is None
    output = run(kernel, PLAIN + "1 / 0", FLAGS)
    assert output.error is not None
    assert output.error[0] == "ZeroDivisionError"
    done(kernel, "model", FLAGS)
    assert not kernel.value("torch.equal(model[0].weight, before)")


def test_a_rank_that_is_killed_is_named_and_the_next_cell_trains_as_one_process(kernel) -> None:
    dying = (
        "import os, signal\n"
        "for number, (x, y) in enumerate(loader):\n"
        "    if number == 1 and os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGKILL)\n"
        "    F.cross_entropy(model(x), y).backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
    )
    weights(kernel, "one", DATA, PLAIN, None)
    assert kernel.run(DATA + "before = model[0].weight.detach().clone()").error is None
    output = run(kernel, dying, FLAGS)
    assert output.error is not None
    assert output.error[0] == "WorkerDied"
    assert "rank 1 was ended by SIGKILL" in output.error[1]
    assert kernel.value("torch.equal(model[0].weight, before)")  # a part of the trained one is gone
    weights(kernel, "many", DATA, PLAIN, FLAGS)
    assert_equal(kernel)


def test_a_plan_is_reported_or_refused_before_the_cell_trains(kernel) -> None:
    assert kernel.run(DATA + "before = model[0].weight.detach().clone()").error is None
    planned = done(kernel, PLAIN, "--cpus 2 --strategy auto --dry-run")
    assert "strategy auto (by the memory that the model takes)" in planned.stdout
    output = run(kernel, PLAIN, "--cpus 2 --strategy auto --memory 1KiB")
    assert output.error is not None
    assert output.error[0] == "ConfigError"
    assert "nothing fits" in output.error[1]
    assert kernel.value("torch.equal(model[0].weight, before)")
    output = done(kernel, PLAIN, "--cpus 2 --strategy auto --memory 1GiB")
    assert "plan ddp (--strategy ddp): the simplest way fits" in output.receipt
    assert not kernel.value("torch.equal(model[0].weight, before)")


def test_a_cell_trains_after_preparing_has_failed_on_one_worker(kernel) -> None:
    fails = """
import os
import torch.nn as nn
class Final(nn.Linear):
    def __init_subclass__(cls):
        if os.environ["RANK"] == "1":
            raise TypeError("no classes are made of this one")
other = Final(6, 3).double()
optimizers = optimizer, torch.optim.SGD(other.parameters(), lr=0.1)
for x, y in loader:
    torch.nn.functional.cross_entropy(model(x) + other(x), y).backward()
    for each in optimizers:
        each.step()
"""
    seed = "torch.manual_seed(3)"
    weights(kernel, "one", f"{DATA}\n{seed}", PLAIN, None)
    assert kernel.run(DATA).error is None
    pids = done(kernel, "import os\nprint(os.getpid())", "--cpus 2 --show-ranks all").stdout.splitlines()
    output = run(kernel, fails, FLAGS)
    assert output.error is not None
    assert "no classes are made of this one" in output.traceback
    assert kernel.run(seed).error is None
    done(kernel, PLAIN, FLAGS)
    assert kernel.run(KEEP.format(name="many")).error is None
    assert_equal(kernel)
    now = done(kernel, "print(os.getpid())", "--cpus 2 --show-ranks all").stdout.splitlines()
    assert sorted(now) == sorted(pids)
