"""Loaders and schedules under the other package's names, in one process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from accel_nb import compat
from accel_nb.errors import RankMismatchError


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in sys.modules if name.partition(".")[0] == "accelerate"]:
        monkeypatch.delitem(sys.modules, name)  # an earlier test may have imported the other package
    compat.install()
    yield
    compat.uninstall()


def prepared(**options: Any) -> tuple[Any, Any, Any]:
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    accelerator: Any = Accelerator(dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True), **options)
    model = nn.Linear(1, 1)
    data = TensorDataset(torch.arange(12.0).view(-1, 1))
    loader = DataLoader(data, batch_size=2, shuffle=True)
    return accelerator, *accelerator.prepare(model, loader)


def test_loaders_are_torchdatas_and_continue_from_a_checkpoint(tmp_path: Path) -> None:
    accelerator, _, loader = prepared()
    assert isinstance(loader, StatefulDataLoader)
    assert accelerator.use_stateful_dataloader
    rest: list[list[float]] = []
    for number, (x,) in enumerate(loader):
        if number > 2:
            rest.append(x.flatten().tolist())
        if number == 2:
            accelerator.save_state(tmp_path)
            saved = loader.state_dict()
    assert saved
    accelerator.load_state(tmp_path)
    seen = [x.flatten().tolist() for (x,) in loader]
    assert seen[-len(rest) :] == rest


def test_a_loader_of_a_state_yields_what_comes_after_it() -> None:
    from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard, SkipDataLoader

    for kind in (DataLoaderShard, DataLoaderDispatcher, SkipDataLoader):
        made: Any = kind
        loader = made(list(range(16)), batch_size=4, use_stateful_dataloader=True)
        assert isinstance(loader, (kind, StatefulDataLoader))
        assert type(loader).__name__ == kind.__name__
        states = []
        batches = [batch.tolist() for batch in loader if states.append(loader.state_dict()) is None]
        assert batches == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
        again = made(list(range(16)), batch_size=4, use_stateful_dataloader=True)
        again.load_state_dict(states[1])
        assert [batch.tolist() for batch in again] == batches[2:]


def test_a_schedule_that_has_ended_keeps_its_rate() -> None:
    from accelerate import Accelerator

    accelerator: Any = Accelerator()
    model = nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule: Any = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=2)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    rates = []
    for _ in range(4):
        accelerator.backward(model(torch.ones(1, 1)).sum())
        optimizer.step()
        schedule.step()
        rates.append(schedule.get_last_lr()[0])
    assert rates[1] == rates[2] == rates[3]
    assert schedule.last_epoch == 2


def test_an_optimizer_of_another_model_is_told_by_a_warning() -> None:
    from accelerate import Accelerator

    accelerator: Any = Accelerator()
    model, other = nn.Linear(1, 1), nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(other.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(1, 1)).sum())
    with pytest.warns(UserWarning, match="the SGD steps no parameter of a prepared model"):
        optimizer.step()


def test_the_error_of_operations_is_ours() -> None:
    from accelerate.utils.operations import DistributedOperationException

    assert DistributedOperationException is RankMismatchError
