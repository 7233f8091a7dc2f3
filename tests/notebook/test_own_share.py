"""Decisions that a loop makes by its own share of the samples: equal on all workers, or reported."""

from __future__ import annotations

import pytest

from tests.notebook.cells import done, run
from tests.notebook.digits_training import SETUP

SUMMED = """
for epoch in range(6):
    total = 0.0
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss.item()
    {decision}
"""
RECORDED = """
from accel_nb.runtime.distributed.process_group import DefaultGroup
torch.distributed.all_reduce(torch.ones(7))
last = DefaultGroup.adopt(DefaultGroup.world_of_open_group()).last_collective()
is_recorded = last is not None and last.sizes == [[7]]
"""
ONE_OF_THEM = "int(os.environ['RANK']) == 0"


def setup(kernel) -> None:
    output = kernel.run("import os\n" + SETUP.format(num_samples=48))
    assert output.error is None, output.traceback


def test_a_plateau_of_the_training_loss_lowers_every_workers_rate(kernel):
    setup(kernel)
    kernel.run("plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.3)")
    output = done(kernel, SUMMED.format(decision=f"plateau.step(total if {ONE_OF_THEM} else 2 * total + epoch)"))
    assert kernel.value("optimizer.param_groups[0]['lr']") < 0.02
    assert not any("differ" in text for text in output.texts)


def test_a_cell_that_only_asks_the_accelerator_is_prepared(kernel):
    setup(kernel)
    kernel.run("%accelerate restart")  # modules before this one may have prepared objects explicitly
    kernel.run("def tell(loss):\n    accelerator.log({'mine': loss.item()})")
    loop = """
seen = torch.zeros(())
for x, y in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    seen += len(x)
    tell(loss)
seen = accelerator.reduce(seen)
"""
    output = done(kernel, loop)
    assert "batch 8 = 2 x 4" in output.receipt
    assert kernel.value("seen.item()") == 48


def test_a_cell_that_uses_the_accelerator_and_does_not_prepare_is_reported(kernel):
    setup(kernel)
    output = done(kernel, "accelerator.set_trigger()\n" + SUMMED.format(decision="pass"))
    assert "its AdamW is not prepared: every worker trains alone" in output.stderr


@pytest.mark.parametrize("flags", ["", "--precision fp16", "--strategy deepspeed"])
@pytest.mark.parametrize("is_counted", [False, True])
def test_an_optimizer_that_the_cell_has_prepared_is_not_reported(kernel, flags, is_counted):
    setup(kernel)
    counted = """
step, num_steps = optimizer.step, 0
def count(*args, **kwargs):
    global num_steps
    num_steps += 1
    return step(*args, **kwargs)
optimizer.step = count
"""
    loop = "for x, y in loader:\n    accelerator.backward(F.cross_entropy(model(x.float()), y))\n    optimizer.step()\n"
    prepare = "model, optimizer, loader = accelerator.prepare(model.float(), optimizer, loader)\n"
    output = done(kernel, prepare + counted * is_counted + loop, f"--cpus 2 {flags}")
    assert output.stderr == ""


def test_weights_in_no_module_are_trained_as_on_one_device(kernel):
    loop = """
w = torch.zeros(6, requires_grad=True, dtype=torch.float64)
for x, y in loader:
    loss = ((x @ w - y) ** 2).mean()
    loss.backward()
    with torch.no_grad():
        w -= 0.05 * w.grad
        w.grad.zero_()
"""
    setup(kernel)
    kernel.run(SUMMED.format(decision="pass") + loop + "plain = w.detach().clone()")
    setup(kernel)
    done(kernel, "x = torch.ones(2, requires_grad=True)")  # which the loops below bind anew
    output = done(kernel, SUMMED.format(decision="pass") + loop)
    assert kernel.value("float((w - plain).abs().max())") < 1e-9
    assert "UserWarning: w: these tensors require gradients and belong to no module" in output.stderr


def test_batches_that_leave_one_sample_for_a_share_are_normalized_as_on_one_device(kernel):
    made = (
        "model = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)).double()\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "loader = DataLoader(TensorDataset(X[:11], Y[:11]), batch_size=8)"
    )
    loop = SUMMED.format(decision="pass")
    setup(kernel)
    kernel.run("torch.manual_seed(3)\n" + made)
    kernel.run(loop + "plain = model[0].weight.detach().clone()")
    kernel.run("torch.manual_seed(3)\n" + made)
    done(kernel, loop)
    assert kernel.value("float((model[0].weight - plain).abs().max())") < 1e-9
    kernel.run("torch.manual_seed(3)\n" + made)
    output = run(kernel, loop, "--cpus 2 --divide data")
    assert output.error is not None
    assert "Expected more than 1 value per channel" in output.error[1]
    assert "the batch was divided: this worker had 1 of its 3 samples" in output.traceback


def test_a_rate_set_by_one_workers_share_is_reported(kernel):
    setup(kernel)
    output = done(kernel, SUMMED.format(decision=f"optimizer.param_groups[0]['lr'] *= 0.5 if {ONE_OF_THEM} else 0.9"))
    assert any("the workers' weights differ after this cell" in text for text in output.texts)
    kernel.run("%accelerate push model optimizer")
    output = done(kernel, SUMMED.format(decision="pass"))
    assert not any("differ" in text for text in output.texts), "the next cell began with the notebook's on every worker"


def test_workers_that_wait_for_one_which_stopped_early_are_called_back(kernel):
    setup(kernel)
    kernel.run("%accelerate restart")  # an open accelerator of an explicit cell exchanges data at the end of each cell
    kernel.run("before = model[0].weight.detach().clone()")
    output = run(kernel, SUMMED.format(decision=f"if epoch == 1 and {ONE_OF_THEM}: break"))
    assert output.error is not None
    assert output.error[0] == "PoolError", output.traceback
    assert "ranks waited in a collective that others never reach" in output.error[1]
    assert any("rank 0 has ended and does not enter it: look for a branch" in text for text in output.texts)
    assert kernel.value("(epoch, bool((model[0].weight != before).all()))") == (1, True)
    assert done(kernel, SUMMED.format(decision="pass")).stderr == ""


def test_workers_that_wait_for_each_other_in_different_collectives_are_called_back(kernel):
    setup(kernel)
    leaves_early = f"        if epoch == 1 and total > 2 and {ONE_OF_THEM}: break\n"
    loop = SUMMED.format(decision="pass").replace("item()\n", "item()\n" + leaves_early)
    output = run(kernel, loop)
    assert output.error is not None
    assert "look for a break or a branch that only some ranks take" in output.error[1]
    done(kernel, RECORDED)
    if not kernel.value("is_recorded"):
        pytest.skip("this version of torch records no collectives of gloo")
    setup(kernel)
    output = run(kernel, loop, "--cpus 2 --strategy fsdp")
    assert output.error is not None
    assert output.error[0] == "PoolError"
    assert "ranks waited in a collective that others never reach" in output.error[1]
    assert any("ranks wait in different collectives: rank 0: " in text for text in output.texts)


def test_metrics_of_shares_are_gathered_and_those_of_whole_batches_are_not(kernel):
    pytest.importorskip("torchmetrics")
    setup(kernel)
    kernel.run("import torchmetrics\nseen, alone = torchmetrics.SumMetric(), torchmetrics.SumMetric()")
    loop = SUMMED.format(decision="pass").replace("total +=", "seen.update(len(x)); total +=")
    assert run(kernel, loop + "counted = seen.compute().item()", "--cpus 2 --divide data").error is None
    assert kernel.value("counted") == 6 * 48
    done(kernel, "seen.reset()\n" + loop + "counted = seen.compute().item()")
    assert kernel.value("counted") == 6 * 48
    evaluation = f"""
with torch.no_grad():
    for x, y in loader:
        alone.update(len(x))
counted = alone.compute().item() if {ONE_OF_THEM} else None
"""
    done(kernel, evaluation)
    assert kernel.value("counted") == 48
