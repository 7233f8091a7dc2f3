# TensorBoard writers that an object of an object holds: used in the notebook and in cells by turns.
# outcome: equal
# compare: model, scalars, trainer.log.step
# needs: tensorboard

# %%
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.tensorboard import SummaryWriter

torch.manual_seed(0)


class Log:
    def __init__(self, folder):
        self.writer = SummaryWriter(folder)
        self.step = 0

    def add(self, name, value):
        self.writer.add_scalar(name, value, self.step)
        self.step += 1


class Trainer:
    def __init__(self, model, log):
        self.model = model
        self.log = log
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(self, loader):
        for x, y in loader:
            loss = ((self.model(x) - y) ** 2).mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.log.add("loss", loss.item())


model = nn.Linear(3, 1)
loader = DataLoader(TensorDataset(torch.randn(16, 3), torch.randn(16, 1)), batch_size=4)
trainer = Trainer(model, Log("runs"))
trainer.log.add("start", 0.5)

# %% accelerate
trainer.train(loader)

# %%
trainer.log.add("between", 1.5)

# %% accelerate
trainer.train(loader)

# %%
trainer.log.add("end", 2.5)
trainer.log.writer.close()
events = EventAccumulator("runs")
events.Reload()
tags = sorted(events.Tags()["scalars"])
scalars = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}
