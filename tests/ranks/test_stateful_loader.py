"""Loaders of torchdata's class: their state is the position in the divided data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from accel_nb import Accelerator
from accel_nb.errors import CheckpointError
from accel_nb.runtime.world import World
from tests.ranks.launch import run_ranks

StatefulDataLoader: Any = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(24)


def batches_after_a_state(accelerator: Accelerator, dataset: Any, **options: Any) -> tuple[list[Any], list[Any], int]:
    """Return the batches after a state, those after it was loaded, and the number after the state of a whole epoch."""
    loader: Any = accelerator.prepare(StatefulDataLoader(dataset, batch_size=2, **options))
    states: list[dict[str, Any]] = []
    batches = [batch.tolist() for batch in loader if states.append(loader.state_dict()) is None]
    ended = loader.state_dict()
    loader.load_state_dict(states[1])
    found = [batch.tolist() for batch in loader]
    loader.load_state_dict(ended)
    return batches[2:], found, len(list(loader))


def states_of_loaders(world: World, num_workers: int = 0) -> list[Any]:
    torch.manual_seed(0)
    accelerator = Accelerator(config={"data.resume_stream": "replay"})
    found = [
        batches_after_a_state(accelerator, range(24), num_workers=num_workers),
        batches_after_a_state(accelerator, range(24), shuffle=True, num_workers=num_workers),
        batches_after_a_state(accelerator, Stream()),
    ]
    accelerator.close()
    return found


@pytest.mark.parametrize("num_workers", [0, 1])
def test_one_process_goes_on_from_a_state(num_workers: int) -> None:
    for expected, found, total in states_of_loaders(World(), num_workers):
        assert found == expected
        assert total == 12


def test_ranks_go_on_from_a_state() -> None:
    first, second = run_ranks(states_of_loaders, 2, timeout_s=60)
    for (expected, found, total), (other, also, _) in zip(first, second, strict=True):
        assert found == expected != other == also
        assert total == 6


def test_state_of_a_loader_that_was_not_prepared_is_refused() -> None:
    state = StatefulDataLoader(range(4), batch_size=2).state_dict()
    loader: Any = Accelerator(cpu=True).prepare(StatefulDataLoader(range(4), batch_size=2))
    with pytest.raises(CheckpointError, match="after prepare"):
        loader.load_state_dict(state)


def starts_skipped(world: World) -> list[tuple[list[Any], list[Any]]]:
    """Return the batches of whole epochs, and of the same epochs without their first batch."""
    torch.manual_seed(0)
    accelerator = Accelerator(config={"data.even_batches": True, "data.use_seedable_sampler": True})
    in_order = [[at, at + 1, at + 2][: 17 - at] for at in range(0, 17, 3)]
    found: list[list[Any]] = []
    choices: list[dict[str, Any]] = [{"shuffle": True, "batch_size": 3}, {"batch_sampler": in_order}]
    for options in choices:
        loader: Any = accelerator.prepare(DataLoader(range(17), **options))  # type: ignore[arg-type]
        for skips in (loader, accelerator.skip_first_batches(loader, 1)):
            loader.set_epoch(2)
            found.append([batch.tolist() for batch in skips])
        stateful: Any = accelerator.prepare(StatefulDataLoader(range(17), **options))
        stateful.set_epoch(2)
        states: list[dict[str, Any]] = []
        found.append([batch.tolist() for batch in stateful if states.append(stateful.state_dict()) is None])
        stateful.load_state_dict(states[0])
        found.append([batch.tolist() for batch in stateful])
    accelerator.close()
    return list(zip(found[::2], found[1::2], strict=True))


def test_last_batches_repeat_the_first_samples_of_an_epoch_whose_start_is_skipped() -> None:
    for found in run_ranks(starts_skipped, 2, timeout_s=60):
        assert len(found) == 4
        for whole, rest in found:
            assert len(whole) == 3
            assert whole in (found[0][0], found[2][0])  # torchdata's loaders have the order of torch's
            assert rest == whole[1:]
