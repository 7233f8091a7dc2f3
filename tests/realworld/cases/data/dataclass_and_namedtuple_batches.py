# A collate function that makes a dataclass with a namedtuple in it, with methods; generic classes, enums and protocols.
# outcome: equal
# compare: model, swapped, kinds
# %%
import enum
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypedDict, TypeVar

import torch
import torch.nn as nn
from torch.utils.data import DataLoader


class Target(NamedTuple):
    value: torch.Tensor
    weight: torch.Tensor


class Kind(enum.Enum):
    TRAIN = "train"
    TEST = "test"


T = TypeVar("T")


class Stack(Generic[T]):
    def __init__(self, items: list[T]) -> None:
        self.items = items


class Swapping(Protocol):
    def swap(self) -> tuple: ...


class Options(TypedDict):
    rate: float


class Pair(NamedTuple):
    one: int
    two: int

    def swap(self) -> tuple:
        return self.two, self.one


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
options = Options(rate=0.05)
swapping: Swapping = Pair(*Stack[int]([1, 2]).items)
swapped = [*swapping.swap(), options["rate"]]
kinds = [Kind("train") is Kind.TRAIN, Kind.TEST.value]


def step(batch: Batch) -> torch.Tensor:
    batch = batch.to("cpu")
    return (batch.target.weight * (model(batch.x).squeeze(1) - batch.target.value) ** 2).mean()


for epoch in range(2):
    for batch in loader:
        loss = step(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
