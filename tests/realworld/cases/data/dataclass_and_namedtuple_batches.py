# A collate function that makes a dataclass with a namedtuple in it, with methods.
# outcome: equal
# compare: model
# %%
from dataclasses import dataclass
from typing import NamedTuple
import torch
import torch.nn as nn
from torch.utils.data import DataLoader


class Target(NamedTuple):
    value: torch.Tensor
    weight: torch.Tensor


@dataclass
class Batch:
    x: torch.Tensor
    target: Target

    def to(self, device):
        return Batch(self.x.to(device), Target(*(t.to(device) for t in self.target)))


samples = [(torch.randn(4), float(i % 3), 1.0) for i in range(33)]


def collate(items) -> Batch:
    x, v, w = zip(*items)
    return Batch(torch.stack(x), Target(torch.tensor(v), torch.tensor(w)))


loader = DataLoader(samples, batch_size=8, shuffle=True, collate_fn=collate)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

# %% accelerate
def step(batch: Batch) -> torch.Tensor:
    batch = batch.to("cpu")
    return (batch.target.weight * (model(batch.x).squeeze(1) - batch.target.value) ** 2).mean()


for epoch in range(2):
    for batch in loader:
        loss = step(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
