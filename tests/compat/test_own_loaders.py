"""Loaders that code divides without an `Accelerator`, under the other package's names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, SequentialSampler

from accel_nb.compat.data.batch_shards import BatchSamplerShard
from accel_nb.compat.data.data_loaders import prepare_data_loader, skip_first_batches
from accel_nb.compat.states import GradientState
from accel_nb.errors import MisuseError
from accel_nb.runtime.process.environment import set_rank_variables
from accel_nb.runtime.world import World
from tests.ranks.launch import run_ranks


class Numbers:
    """A dataset without a length, whose items are numbers, or tensors of numbers for lists of indices."""

    def __getitem__(self, index: Any) -> torch.Tensor:
        return torch.as_tensor(index, dtype=torch.float64)


class Uneven:
    """A batch sampler without a batch size."""

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([0, 1], [2], [3, 4, 5], [6])

    def __len__(self) -> int:
        return 4


class Unmeasured(Sampler[int]):
    """A sampler without a length."""

    def __init__(self) -> None:
        pass

    def __iter__(self) -> Iterator[int]:
        yield from range(8)


class Stream(IterableDataset[float]):
    def __iter__(self) -> Iterator[float]:
        yield from map(float, range(10))


def loader_of(data: Any, *args: Any, **options: Any) -> Any:
    return DataLoader(data, *args, **options)


def divide(loader: Any, *args: Any, **options: Any) -> Any:
    return prepare_data_loader(loader, *args, **options)


def read(loader: Any) -> list[list[float]]:
    return [batch.tolist() for batch in loader]


def test_batches_of_any_size_are_divided() -> None:
    loader: Any = loader_of(Numbers(), batch_sampler=Uneven())
    made = divide(loader, num_processes=2, process_index=0, even_batches=False)
    assert read(made) == [[0, 1], [3, 4, 5]]
    assert made.total_batch_size == 0


def test_a_sampler_without_a_length_is_divided() -> None:
    loader: Any = loader_of(Numbers(), 2, sampler=Unmeasured())
    assert read(divide(loader, num_processes=2, process_index=1)) == [[2, 3], [6, 7]]


def test_a_dataset_that_is_read_by_batches_is_divided() -> None:
    order = BatchSampler(SequentialSampler(range(10)), 2, drop_last=False)
    loader: Any = loader_of(Numbers(), None, sampler=order)
    made = divide(loader, num_processes=2, process_index=1)
    assert read(made) == [[2, 3], [6, 7], [0, 1]]
    assert made.total_batch_size == 4
    loader = loader_of(range(4), None)
    with pytest.raises(MisuseError, match="batch_size=None has no batches to divide"):
        divide(loader, num_processes=2, process_index=1)
    assert len(list(divide(loader))) == 4


def test_batches_may_be_arrays() -> None:
    class Arrays:
        batch_size = 2

        def __iter__(self) -> Iterator[Any]:
            yield from np.arange(6).reshape(3, 2)

        def __len__(self) -> int:
            return 3

    assert list(BatchSamplerShard(Arrays(), 2, 1, split_batches=True)) == [[1], [3], [5]]
    assert list(BatchSamplerShard(Arrays(), 2, 1)) == [[2, 3], [0, 1]]


@pytest.mark.parametrize(("drop_last", "expected"), [(False, 2), (True, -1)])
def test_the_samples_of_the_last_batch_are_counted_unless_it_is_dropped(drop_last: bool, expected: int) -> None:
    loader = divide(loader_of(range(10), 4, drop_last=drop_last))
    assert [GradientState().remainder for _ in loader][-1] == expected


@pytest.mark.parametrize("has_state", [False, True])
def test_a_loader_without_its_first_batches_moves_the_others_to_the_device(has_state: bool) -> None:
    options: Any = {"put_on_device": True, "use_stateful_dataloader": has_state, "non_blocking": True}
    for data in (Stream(), torch.arange(10.0)):
        loader: Any = loader_of(data, 2)
        made: Any = divide(loader, torch.device("cpu"), **options)
        made = skip_first_batches(skip_first_batches(made, 2), 1)
        assert (made.device, made._non_blocking) == (torch.device("cpu"), True)
        assert read(made) == [[6, 7], [8, 9]]


def orders(world: World) -> list[list[list[float]]]:
    """Return the batches of each loader on this rank, whose own seed differs from that of the others."""
    set_rank_variables(world)
    from accel_nb.compat.states import PartialState

    state = PartialState()
    torch.manual_seed(world.rank)
    found = [
        read(divide(loader_of(torch.arange(8.0), 2, shuffle=True), **options))
        for options in ({}, {"use_seedable_sampler": True})
    ]
    generator = torch.Generator().manual_seed(world.rank)
    loader = loader_of(torch.arange(8.0), 2, shuffle=True, generator=generator)
    found.append(read(divide(loader, rng_types=["generator"])))
    state.destroy_process_group()
    return found


def test_processes_with_other_seeds_read_each_sample_once() -> None:
    ranks = run_ranks(orders, 2, timeout_s=60)
    for number in range(3):
        samples = [sample for found in ranks for batch in found[number] for sample in batch]
        assert sorted(samples) == list(range(8))
