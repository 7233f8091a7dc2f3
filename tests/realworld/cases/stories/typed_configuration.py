# A dataclass configuration and typed functions whose annotations name classes of earlier cells.
# outcome: equal
# compare: model, config, report
# %%
from __future__ import annotations
from dataclasses import dataclass, field
import torch
import torch.nn as nn
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset


class Schedule:
    warmup: int = 2


@dataclass
class Config:
    hidden: int = 8
    lr: float = 0.05
    schedule: Schedule = field(default_factory=Schedule)

# %%
@dataclass
class Report:
    config: Config
    steps: int = 0


def build(config: Config) -> nn.Module:
    return nn.Sequential(nn.Linear(3, config.hidden), nn.ReLU(), nn.Linear(config.hidden, 1))

# %% accelerate
def fit(model: nn.Module, loader: DataLoader[tuple[Tensor, Tensor]], config: Config) -> Report:
    report: Report = Report(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr)
    for xb, yb in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(xb), yb).backward()
        optimizer.step()
        report.steps += 1
    return report


config = Config(hidden=6)
torch.manual_seed(0)
x = torch.randn(20, 3)
model = build(config)
report = fit(model, DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=5), config).steps
config = config.hidden, config.lr
