"""Streams whose shards each rank reads alone: shards of different lengths train the same under any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from accel_nb.compat.accelerator import Accelerator
from accel_nb.compat.plugins import DataLoaderConfiguration
from accel_nb.runtime.process.environment import set_rank_variables
from accel_nb.runtime.world import World
from tests.ranks.launch import run_ranks

FILES = ([0.0, 1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0])


class Files(IterableDataset[float]):
    """Samples of files, which are divided among ranks."""

    def __init__(self, files: Sequence[list[float]] = FILES) -> None:
        self.files = files

    @property
    def num_shards(self) -> int:
        return len(self.files)

    def shard(self, num_shards: int, index: int) -> Files:
        return Files(self.files[index::num_shards])

    def __iter__(self) -> Iterator[float]:
        return (value for file in self.files for value in file)


def last_gradient(world: World, divides_by_total: bool) -> tuple[list[float], float]:
    """Return the samples of a rank's last batch, and the gradient of a loss whose mean is that of the samples."""
    set_rank_variables(world)
    options = DataLoaderConfiguration(even_batches=True, dispatch_batches=False)
    accelerator: Any = Accelerator(cpu=True, dataloader_config=options)
    model: Any = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Files(), 3))
    batch, gradient = torch.zeros(0), 0.0
    for batch in loader:
        values = model(batch[:, None].float())
        total = accelerator.reduce(torch.tensor(float(len(batch))), "sum") / accelerator.num_processes
        accelerator.backward(values.sum() / total if divides_by_total else values.mean())
        gradient = model.weight.grad.item()
        optimizer.step()
        optimizer.zero_grad()
    return batch.tolist(), gradient


@pytest.mark.parametrize("divides_by_total", [True, False])
def test_no_sample_is_repeated_and_the_gradient_is_that_of_all_samples(divides_by_total: bool) -> None:
    (first, gradient), (second, other) = run_ranks(last_gradient, 2, divides_by_total)
    assert (first, second) == ([3.0, 4.0], [8.0])
    assert gradient == other == pytest.approx((3 + 4 + 8) / 3)
