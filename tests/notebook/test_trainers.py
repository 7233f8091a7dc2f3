"""Trainers of other packages, unchanged, on the workers."""

from __future__ import annotations

import pytest

from tests.notebook.cells import setup

TRANSFORMERS = """
import tempfile, torch
from accel_nb import notebook_launcher

def train(folder):
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = BertForSequenceClassification(BertConfig(vocab_size=32, max_position_embeddings=16, **sizes))
    data = [{"input_ids": torch.randint(0, 32, (8,)), "labels": torch.tensor(i % 2)} for i in range(32)]
    options = {"report_to": [], "use_cpu": True, "save_strategy": "no", "disable_tqdm": True}
    arguments = TrainingArguments(folder, per_device_train_batch_size=4, num_train_epochs=2, **options)
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    steps = trainer.train().global_step
    return steps, arguments.world_size, round(sum(p.detach().sum().item() for p in model.parameters()), 3)
"""


def test_the_trainer_of_transformers_trains_on_every_worker(kernel):
    pytest.importorskip("transformers")
    setup(kernel, TRANSFORMERS)
    setup(kernel, "results = notebook_launcher(train, (tempfile.mkdtemp(),), 2)")
    first, second = kernel.value("results")
    assert first == second, "the replicas are equal"
    assert first[:2] == (8, 2), "32 samples, 2 epochs, 4 at a time on each of 2 workers"


def test_the_trainer_finds_the_workers_without_being_told_that_they_are_cpus(kernel):
    pytest.importorskip("transformers")
    setup(kernel, TRANSFORMERS.replace('"use_cpu": True, ', ""))
    setup(kernel, "results = notebook_launcher(train, (tempfile.mkdtemp(),), 2)")
    first, second = kernel.value("results")
    assert first == second, "the replicas are equal"
    assert first[:2] == (8, 2)


BUILT_EARLIER = """
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
net = BertForSequenceClassification(BertConfig(vocab_size=32, max_position_embeddings=16, **sizes))
data = [{"input_ids": torch.randint(0, 32, (8,)), "labels": torch.tensor(i % 2)} for i in range(8)]
options = TrainingArguments(tempfile.mkdtemp(), report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True)
trainer = Trainer(model=net, args=options, train_dataset=data)
"""


def test_a_trainer_that_was_built_for_the_notebooks_process_is_refused(kernel):
    """It holds an accelerator of another package, whose devices are settled when it is built."""
    pytest.importorskip("transformers")
    setup(kernel, f"import tempfile, torch\n{BUILT_EARLIER}")
    output = kernel.run("%%accelerate --cpus 2\ntrainer.train()")
    assert output.error is not None
    assert "`trainer` (transformers.trainer.Trainer) cannot be sent to the workers" in output.error[1]
    assert "it holds an Accelerator of the package accelerate" in output.error[1]
    assert "Make it inside the %%accelerate cell" in output.error[1]


FABRIC = """
import lightning, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)
inputs = torch.randn(24, 4, dtype=torch.float64)
pairs = TensorDataset(inputs, inputs.sum(1, keepdim=True))

def fit(devices, strategy, batch_size):
    fabric = lightning.Fabric(accelerator="cpu", devices=devices, strategy=strategy)
    fabric.launch()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    net, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = fabric.setup_dataloaders(DataLoader(pairs, batch_size=batch_size))
    for epoch in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            fabric.backward(nn.functional.mse_loss(net(x), y))
            optimizer.step()
    return torch.cat([value.detach().flatten() for value in model.parameters()])

plain = fit(1, "auto", 8)
"""


@pytest.mark.nightly
@pytest.mark.parametrize("way", ["1, 'auto', 8", "2, 'ddp', 4"])
def test_fabric_trains_what_one_process_trains(kernel, way):
    """On one device its loop is a plain one, which is divided; on two it divides by itself, and is left alone."""
    setup(kernel, FABRIC)
    setup(kernel, f"%%accelerate --cpus 2\ntrained = fit({way})")
    assert kernel.value("torch.allclose(trained, plain, rtol=0, atol=1e-12)") is True


LIGHTNING = """
import tempfile, torch, logging
from torch.utils.data import DataLoader, TensorDataset
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
torch.manual_seed(0)
inputs = torch.randn(32, 4)
loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4)
folder = tempfile.mkdtemp()
"""

LIGHTNING_CELL = """import lightning
class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, index):
        x, y = batch
        return torch.nn.functional.mse_loss(self.layer(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)

torch.manual_seed(0)
net = Net()
trainer = lightning.Trainer(
    max_epochs=2, accelerator="cpu", devices=2, strategy="ddp", logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
)
trainer.fit(net, loader)
mine = trainer.global_rank, trainer.world_size, trainer.global_step, round(net.layer.weight.sum().item(), 4)
every = [None] * 2
torch.distributed.all_gather_object(every, mine)
"""


def test_the_trainer_of_lightning_trains_on_every_worker(kernel):
    """In a cell, as its users write it; its workers' group is the pool's. Twice: nothing of the first is in the way."""
    setup(kernel, LIGHTNING)
    for _ in range(2):
        setup(kernel, f"%%accelerate --cpus 2 --no-prepare --timeout 100\n{LIGHTNING_CELL}")
        first, second = kernel.value("every")
        assert first[:3] == (0, 2, 8), "32 samples, 2 epochs, 4 at a time on each of 2 workers"
        assert second[:3] == (1, 2, 8)
        assert first[3] == second[3], "the replicas are equal"


TORCHRUN = """import os, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = TensorDataset(torch.arange(32.0).reshape(8, 4) / 32, torch.ones(8, 1))
    sampler = DistributedSampler(data, shuffle=False)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, batch_size=2, sampler=sampler):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    total = torch.tensor([float(rank + 1)])
    dist.all_reduce(total)
    print(rank, dist.get_world_size(), int(os.environ["LOCAL_RANK"]), total.item())
    weight = model.module.weight.detach().clone()
    dist.destroy_process_group()
    return weight

if __name__ == "__main__":
    weight = main()
"""


def test_code_for_torchrun_runs_as_it_is_and_trains_what_one_process_trains(kernel):
    for _ in range(2):  # it closes its group at the end, and opens one again
        output = kernel.run(f"%%accelerate --cpus 2\n{TORCHRUN}")
        assert output.error is None, output.traceback
        assert output.stdout == "0 2 0 3.0\n"
        assert kernel.run("%accelerate logs 1").stdout == "--- rank 1\n1 2 1 3.0\n\n"
    alone = (
        TORCHRUN.split("def main")[0]
        + """
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
x, y = torch.arange(32.0).reshape(8, 4) / 32, torch.ones(8, 1)
for epoch in range(2):
    for step in range(2):
        rows = [4 * step, 4 * step + 2, 4 * step + 1, 4 * step + 3]
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x[rows]), y[rows]).backward()
        optimizer.step()
"""
    )
    setup(kernel, alone)
    assert kernel.value("torch.allclose(model.weight, weight, atol=1e-6)") is True
