"""Prepared loaders under the alias set the epoch of their samplers and datasets themselves, as accelerate's do."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from accel_nb.compat.accelerator import Accelerator
from accel_nb.compat.data.data_loaders import skip_first_batches
from accel_nb.compat.plugins import DataLoaderConfiguration
from accel_nb.runtime.process.environment import set_rank_variables
from accel_nb.runtime.world import World
from tests.ranks.launch import run_ranks


class Order(Sampler[int]):
    """An order of four samples that depends on the epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        return iter([(place + self.epoch) % 4 for place in range(4)])

    def __len__(self) -> int:
        return 4

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Stream(IterableDataset[int]):
    """Samples that depend on the epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        return iter([10 * self.epoch + place for place in range(4)])

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def samples(loader: Any) -> list[int]:
    return [value for batch in loader for value in batch.tolist()]


@pytest.fixture
def accelerator() -> Any:
    return Accelerator(cpu=True)


def test_iterations_that_are_read_to_the_end_are_epochs(accelerator: Any) -> None:
    loader = accelerator.prepare(DataLoader(range(4), 2, sampler=Order()))
    assert (loader.iteration, loader.skip_batches, loader.base_dataloader) == (0, 0, loader)
    assert [samples(loader), samples(loader)] == [[0, 1, 2, 3], [1, 2, 3, 0]]
    for _ in loader:  # epoch 2, and not read to its end
        break
    assert samples(loader) == [2, 3, 0, 1]
    assert loader.iteration == 3
    loader.set_epoch(1)
    assert samples(loader) == [1, 2, 3, 0]
    loader.iteration = 3
    assert samples(skip_first_batches(loader, 1)) == [1, 2]
    assert loader.iteration == 4


def test_a_stream_has_the_epoch_too(accelerator: Any) -> None:
    loader = accelerator.prepare(DataLoader(Stream(), 2))
    assert [samples(loader), samples(loader)] == [[0, 1, 2, 3], [10, 11, 12, 13]]


def test_a_loaded_checkpoint_goes_on_with_its_epoch(accelerator: Any, tmp_path: Path) -> None:
    loader = accelerator.prepare(DataLoader(range(4), 2, sampler=Order()))
    samples(loader)
    accelerator.save_state(tmp_path / "state")
    other = Accelerator(cpu=True)
    again = other.prepare(DataLoader(range(4), 2, sampler=Order()))
    other.load_state(tmp_path / "state")
    assert samples(again) == samples(loader) == [1, 2, 3, 0]


def test_an_iteration_of_the_loaders_own_class_is_left(accelerator: Any) -> None:
    class Counting(DataLoader[int]):
        iteration = 7

    loader = accelerator.prepare(Counting(range(4), 2, sampler=Order()))  # pyright: ignore[reportArgumentType]
    assert [samples(loader), samples(loader)] == [[0, 1, 2, 3], [0, 1, 2, 3]]
    assert loader.iteration == 7


def test_a_prepared_loader_is_freed_and_copied(accelerator: Any) -> None:
    loader = accelerator.prepare(DataLoader(range(4), 2, sampler=Order()))
    samples(loader)
    for copied in (copy.copy(loader), pickle.loads(pickle.dumps(loader))):
        assert type(copied) is DataLoader
        assert samples(copied) == samples(copied)
    accelerator.free_memory()
    assert samples(loader) == samples(loader)  # a plain loader again
    ref = weakref.ref(loader)
    del loader
    gc.collect()
    assert ref() is None


def read_epochs(world: World) -> list[list[int]]:
    set_rank_variables(world)
    accelerator: Any = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(range(4), 1, sampler=Order()))
    stream = accelerator.prepare(DataLoader(Stream(), 1))
    return [samples(loader), samples(loader), samples(stream), samples(stream)]


def test_every_rank_has_the_epoch() -> None:
    first, second = run_ranks(read_epochs, 2)
    assert first == [[0, 2], [1, 3], [0, 2], [10, 12]]
    assert second == [[1, 3], [2, 0], [1, 3], [11, 13]]


def test_the_seedable_order_is_that_of_the_epoch() -> None:
    accelerator: Any = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    torch.manual_seed(0)
    loader = accelerator.prepare(DataLoader(range(8), 4, shuffle=True))  # pyright: ignore[reportArgumentType]
    first = samples(loader)
    assert samples(loader) != first
    loader.set_epoch(0)
    assert samples(loader) == first
