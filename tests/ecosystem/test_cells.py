"""Trainers of other packages in a plain cell: what one device trains, with the values back in the notebook."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.kernel import Kernel, running_kernel

DATA = """
import logging, tempfile, torch, warnings
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
torch.manual_seed(0)
x = torch.randn(32, 4)
data = TensorDataset(x, x.sum(1, keepdim=True))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, X):
        return self.layer(X)
"""

IGNITE = """
from ignite.engine import Events, create_supervised_trainer

def build():
    torch.manual_seed(1)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return model, optimizer, create_supervised_trainer(model, optimizer, nn.functional.mse_loss)

alone, optimizer, trainer = build()
trainer.run(DataLoader(data, batch_size=8), max_epochs=2)
model, optimizer, trainer = build()
"""

IGNITE_CELL = """%%accelerate --cpus 2
losses = []
trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: losses.append(engine.state.output))
state = trainer.run(DataLoader(data, batch_size=8), max_epochs=2)
"""

SKORCH = """
from skorch import NeuralNetRegressor

def build():
    torch.manual_seed(1)
    return NeuralNetRegressor(Net, max_epochs=2, lr=0.05, batch_size=8, train_split=None, verbose=0)

alone = build().fit(data.tensors[0], data.tensors[1])
net = build()
"""

LIGHTNING = """
import lightning
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.simplefilter("ignore")

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def training_step(self, batch, index):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)

def build(devices, strategy):
    torch.manual_seed(1)
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return Module(), lightning.Trainer(
        max_epochs=2, accelerator="cpu", devices=devices, strategy=strategy, use_distributed_sampler=False,
        enable_model_summary=False, default_root_dir=tempfile.mkdtemp(), **options)

alone, trainer = build(1, "auto")
trainer.fit(alone, DataLoader(data, batch_size=8))
"""

LIGHTNING_CELL = """%%accelerate --cpus 2
net, trainer = build(2, "ddp")
sampler = DistributedSampler(data, num_replicas=2, rank=trainer.global_rank, shuffle=False)
trainer.fit(net, DataLoader(data, batch_size=4, sampler=sampler))
"""

TRANSFORMERS = """
import tempfile, torch

class Items(torch.utils.data.Dataset):
    def __init__(self, count):
        self.items = torch.randint(3, 60, (count, 8), generator=torch.Generator().manual_seed(3))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return {"input_ids": self.items[index], "labels": self.items[index].flip(0)}

def train():
    from transformers import (
        Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration, TrainerCallback)

    class Losses(TrainerCallback):
        def __init__(self):
            self.values = []

        def on_log(self, args, state, control, logs=None, **kwargs):
            if "loss" in logs:
                self.values.append(logs["loss"])

    class Sequential(Seq2SeqTrainer):
        def _get_train_sampler(self, *args):
            return None

    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    model = T5ForConditionalGeneration(
        T5Config(vocab_size=64, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0, **sizes))
    arguments = Seq2SeqTrainingArguments(
        tempfile.mkdtemp(), per_device_train_batch_size=4, per_device_eval_batch_size=4, num_train_epochs=1,
        learning_rate=1e-2, logging_steps=1, save_strategy="no", predict_with_generate=True, generation_max_length=8,
        report_to=[], use_cpu=True, disable_tqdm=True, dataloader_pin_memory=False)
    losses = Losses()
    trainer = Sequential(model, arguments, train_dataset=Items(32), eval_dataset=Items(8), callbacks=[losses])
    trainer.train()
    return model, losses.values, trainer.evaluate()["eval_loss"]
"""


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    with running_kernel() as running:
        running.run("%load_ext accel_nb")
        yield running


def run(kernel: Kernel, *cells: str) -> str:
    """Run cells that must pass, and return the error output of the last."""
    output = None
    for cell in cells:
        output = kernel.run(cell, timeout_s=200)
        assert output.error is None, output.traceback
    return "" if output is None else output.stderr


@pytest.mark.timeout(300)
def test_ignite_is_divided_and_equals_one_process(kernel: Kernel) -> None:
    told = run(kernel, DATA, IGNITE, IGNITE_CELL)
    assert "every worker trains alone" not in told
    assert kernel.value("torch.allclose(model.layer.weight, alone.layer.weight, rtol=0, atol=1e-6)") is True
    assert kernel.value("(len(losses), trainer.state.epoch)") == (8, 2)


@pytest.mark.timeout(300)
def test_skorch_equals_one_process_and_says_that_it_is_not_divided(kernel: Kernel) -> None:
    told = run(kernel, DATA, SKORCH, "%%accelerate --cpus 2\nnet.fit(data.tensors[0], data.tensors[1])")
    assert told.count("every worker trains alone, with all of the data") == 1
    assert kernel.value("torch.equal(net.module_.layer.weight, alone.module_.layer.weight)") is True
    assert kernel.value("len(net.history)") == 2


@pytest.mark.timeout(300)
def test_lightning_divides_by_itself_or_says_that_it_does_not(kernel: Kernel) -> None:
    told = run(kernel, DATA, LIGHTNING, LIGHTNING_CELL)
    assert "every worker trains alone" not in told
    same = "torch.allclose(net.net.layer.weight, alone.net.layer.weight, rtol=0, atol=1e-6)"
    assert kernel.value(same) is True
    one = '%%accelerate --cpus 2\nnet, trainer = build(1, "auto")\ntrainer.fit(net, DataLoader(data, batch_size=8))'
    assert run(kernel, one).count("every worker trains alone, with all of the data") == 1
    assert kernel.value(same) is True


@pytest.mark.timeout(500)
def test_a_sequence_to_sequence_trainer_calls_back_and_prints_what_it_does_under_accelerate(kernel: Kernel) -> None:
    run(kernel, TRANSFORMERS, "%%accelerate --cpus 2\nmodel, losses, evaluated = train()")
    run(kernel, "theirs = losses, evaluated, float(model.shared.weight.abs().sum())", "%accelerate restart")
    alias = "from accel_nb import compat\ncompat.install()\n"
    run(kernel, f"%%accelerate --cpus 2\n{alias}model, losses, evaluated = train()")
    run(kernel, "ours = losses, evaluated, float(model.shared.weight.abs().sum())")
    assert kernel.value("len(losses)") == 4
    assert kernel.value("ours") == kernel.value("theirs")
