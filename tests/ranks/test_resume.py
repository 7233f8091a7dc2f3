"""Going on in the middle of an epoch, on any number of ranks: no sample is lost, none is read twice."""

from __future__ import annotations

import itertools
import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, Sampler

from accel_nb.accelerator import Accelerator
from accel_nb.runtime.world import World
from tests.ranks.launch import RankError, run_ranks
from tests.support.nightly import nightly

NUM_SAMPLES = 53


class Samples(Dataset[tuple[int, Tensor]]):
    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return index, torch.tensor([index / NUM_SAMPLES, 1.0])


class Noisy(Samples):
    """Draws from torch's generator for each sample, as augmentations do."""

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return index, torch.tensor([index / NUM_SAMPLES, 1.0]) + 0.1 * torch.rand(2)


class Shuffled(Sampler[int]):
    """A sampler of the user's own, that shuffles with Python's generator."""

    def __iter__(self) -> Iterator[int]:
        order = list(range(NUM_SAMPLES))
        random.shuffle(order)
        return iter(order)

    def __len__(self) -> int:
        return NUM_SAMPLES


class Buckets(Sampler[list[int]]):
    """Batches of different sizes, drawn with NumPy."""

    def __iter__(self) -> Iterator[list[int]]:
        order = np.random.permutation(NUM_SAMPLES).tolist()
        sizes = [3, 7, 5, 4]
        while order:
            sizes.append(sizes.pop(0))
            yield order[: sizes[-1]]
            order = order[sizes[-1] :]


class Stream(IterableDataset[tuple[int, Tensor]]):
    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        for index in range(NUM_SAMPLES):
            yield index, torch.tensor([index / NUM_SAMPLES, 1.0])


class StatefulStream(IterableDataset[tuple[int, Tensor]]):
    """Has a state, by the convention of torchdata, and counts what it reads."""

    def __init__(self) -> None:
        self.next = 0
        self.num_read = 0

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        while self.next < NUM_SAMPLES:
            self.next += 1
            self.num_read += 1
            yield self.next - 1, torch.tensor([self.next / NUM_SAMPLES, 1.0])
        self.next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


def make_loader(kind: str) -> DataLoader[Any]:
    if kind == "shuffle":
        return DataLoader(Samples(), batch_size=6, shuffle=True)
    if kind == "drop_last":
        return DataLoader(Samples(), batch_size=6, shuffle=True, drop_last=True)
    if kind == "noisy":
        return DataLoader(Noisy(), batch_size=6, shuffle=True)
    if kind == "in order":
        return DataLoader(Samples(), batch_size=6)
    if kind == "generator":
        return DataLoader(Samples(), batch_size=6, shuffle=True, generator=torch.Generator().manual_seed(3))
    if kind == "batch sampler":
        return DataLoader(Samples(), batch_sampler=BatchSampler(RandomSampler(range(NUM_SAMPLES)), 4, False))
    if kind == "own sampler":
        return DataLoader(Samples(), batch_size=6, sampler=Shuffled())
    if kind == "buckets":
        return DataLoader(Samples(), batch_sampler=Buckets())
    if kind == "workers":
        return DataLoader(Samples(), batch_size=6, shuffle=True, num_workers=2)
    if kind == "persistent":
        return DataLoader(Samples(), batch_size=6, shuffle=True, num_workers=1, persistent_workers=True)
    if kind == "stream":
        return DataLoader(Stream(), batch_size=6)
    if kind == "stateful":
        return DataLoader(StatefulStream(), batch_size=6)
    raise ValueError(kind)


class Training:
    """Trains on samples, keeps the ids of those it trained on, and can stop anywhere."""

    def __init__(self, world: World, kind: str, folder: Path, **options: Any) -> None:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        self.model = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 5, 0.9)
        self.loader = make_loader(kind)
        config: dict[str, Any] = {"checkpoint": {"dir": str(folder)}, "data": options.pop("data", {})}
        self.accelerator = Accelerator(world=world, cpu=True, config=config, **options)
        self.accelerator.prepare(self.model, self.optimizer, self.scheduler, self.loader)
        self.ids: list[list[int]] = []
        self.losses: list[float] = []

    def epoch(self, stop_after: int | None = None) -> None:
        """Train on what is left of an epoch, or on so many batches."""
        ids: list[int] = []
        self.ids.append(ids)
        for number, (indices, values) in enumerate(self.loader, 1):
            with self.accelerator.accumulate():
                loss = self.model(values).square().mean()
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            share = self.accelerator.components.stepper.window.share
            ids += indices[: share.num_valid].tolist() if share else []
            self.losses.append(loss.item())
            if number == stop_after:
                return

    def end(self) -> tuple[list[list[int]], dict[str, Tensor]]:
        state = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.accelerator.close()
        return self.ids, state


def train_and_save(world: World, kind: str, folder: Path, plan: list[int | None], options: dict[str, Any]) -> Any:
    training = Training(world, kind, folder, **options)
    for stop_after in plan:
        training.epoch(stop_after)
    training.accelerator.save_state()
    return training.end()


def load_and_train(world: World, kind: str, folder: Path, plan: list[int | None], options: dict[str, Any]) -> Any:
    training = Training(world, kind, folder, **options)
    torch.manual_seed(17)  # what a new process has drawn is not what the old one had
    random.seed(17)
    np.random.seed(17)
    training.accelerator.load_state()
    for stop_after in plan:
        training.epoch(stop_after)
    return training.end()


def each(world: World, fn: Callable[..., Any], cases: dict[Any, tuple[Any, ...]]) -> dict[Any, Any]:
    """Call ``fn(world, *case)`` for every case in one launch: a process group may serve any number of runs."""
    return {name: fn(world, *case) for name, case in cases.items()}


def seen_once(*parts: list[Any], epoch: tuple[int, ...] = (-1, 0), what: str = "") -> None:
    """Assert that the results of several runs, each rank's ids by epoch, make up one epoch."""
    found: Counter[int] = Counter()
    for results, number in zip(parts, epoch, strict=True):
        for ids, _ in results:
            found.update(ids[number])
    lost, repeated = NUM_SAMPLES - len(found), sum(count - 1 for count in found.values())
    assert (lost, repeated) == (0, 0), f"{what} {lost} lost, {repeated} repeated: {found}"


SOME_SIZES = [1, nightly(2), 3, nightly(4)]


@pytest.mark.parametrize("saved", SOME_SIZES)
@pytest.mark.parametrize("batch", ["per-worker", "global"])
def test_the_rest_of_an_epoch_is_seen_once_on_any_number_of_ranks(saved: int, batch: str, tmp_path: Path) -> None:
    step = random.Random(f"{saved} {batch}").randint(1, 2)  # 53 samples are 3 steps of 4 x 6
    options = {"batch": batch}
    before = run_ranks(train_and_save, saved, "shuffle", tmp_path, [None, step], options)
    for loading in (1, 2, 3, 4):
        after = run_ranks(load_and_train, loading, "shuffle", tmp_path, [None, None], options)
        seen_once(before, after)
        assert sum(len(ids[1]) for ids, _ in after) == NUM_SAMPLES


KINDS = ["in order", "generator", "batch sampler", "own sampler", "buckets", "workers", "persistent", "stateful"]


@pytest.mark.parametrize(("saved", "loading"), [(2, 3), nightly(1, 2), nightly(2, 1)])
def test_every_kind_of_loader_goes_on(saved: int, loading: int, tmp_path: Path) -> None:
    before, after = (
        run_ranks(each, size, train, {kind: (kind, tmp_path / kind, [None, stop], {}) for kind in KINDS})
        for size, train, stop in ((saved, train_and_save, 2), (loading, load_and_train, None))
    )
    for kind in KINDS:
        rest = [found[kind] for found in after]
        seen_once([found[kind] for found in before], rest, what=kind)
        assert sum(len(ids[1]) for ids, _ in rest) == NUM_SAMPLES, kind


@pytest.mark.parametrize("data", [{"use_seedable_sampler": True}, {"dispatch_batches": True}, {"even_batches": True}])
def test_options_of_loaders_are_followed(data: dict[str, Any], tmp_path: Path) -> None:
    options = {"data": data, "batch": "global"}
    before = run_ranks(train_and_save, 4, "shuffle", tmp_path, [None, 3], options)
    after = run_ranks(load_and_train, 3, "shuffle", tmp_path, [None, None], options)
    seen_once(before, after)


class Pausing(Training):
    """Saves after a batch and goes on."""

    def run(self, num_epochs: int, save_after: int) -> None:
        number = 0
        for _ in range(num_epochs):
            ids: list[int] = []
            self.ids.append(ids)
            for indices, values in self.loader:
                with self.accelerator.accumulate():
                    self.accelerator.backward(self.model(values).square().mean())
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
                ids += indices.tolist()
                number += 1
                if number == save_after:
                    self.accelerator.save_state()


def save_and_go_on(world: World, kind: str, folder: Path, save_after: int, options: dict[str, Any]) -> Any:
    training = Pausing(world, kind, folder, **options)
    training.run(3, save_after)
    return training.end()


BIT_EXACT = ["shuffle", "noisy", "drop_last", "generator", "own sampler", "buckets", "workers", "persistent"]


@pytest.mark.parametrize(("save_after", "left"), [(3, 3), nightly(12, 2)])
@pytest.mark.parametrize("size", [nightly(1), 2])
def test_as_many_ranks_end_with_the_same_bits(size: int, save_after: int, left: int, tmp_path: Path) -> None:
    options = {"gradient_accumulation_steps": 2, "batch": "global"}  # an odd number of batches: inside of a window
    saving = {kind: (kind, tmp_path / kind, save_after, options) for kind in BIT_EXACT}
    loading = {kind: (kind, tmp_path / kind, [None] * left, options) for kind in BIT_EXACT}
    per_rank = zip(
        run_ranks(each, size, save_and_go_on, saving), run_ranks(each, size, load_and_train, loading), strict=True
    )
    for (whole, resumed), kind in itertools.product(per_rank, BIT_EXACT):
        (ids, weights), (resumed_ids, resumed_weights) = whole[kind], resumed[kind]
        assert ids[-left + 1 :] == resumed_ids[1:], kind
        assert ids[-left][-len(resumed_ids[0]) :] == resumed_ids[0], kind
        assert all(torch.equal(weights[name], resumed_weights[name]) for name in weights), kind


def test_an_epoch_may_be_resumed_twice(tmp_path: Path) -> None:
    first = run_ranks(train_and_save, 3, "shuffle", tmp_path, [None, 1], {})
    second = run_ranks(resume_and_save, 2, "shuffle", tmp_path, [1])
    third = run_ranks(resume_and_save, 1, "shuffle", tmp_path, [2])
    fourth = run_ranks(load_and_train, 2, "shuffle", tmp_path, [None], {})
    seen_once(first, second, third, fourth, epoch=(-1, 0, 0, 0))


def resume_and_save(world: World, kind: str, folder: Path, plan: list[int | None]) -> Any:
    training = Training(world, kind, folder)
    training.accelerator.load_state()
    for stop_after in plan:
        training.epoch(stop_after)
    training.accelerator.save_state()
    return training.end()


def test_between_epochs_the_next_one_is_whole(tmp_path: Path) -> None:
    run_ranks(train_and_save, 2, "shuffle", tmp_path, [None, None], {})
    after = run_ranks(load_and_train, 3, "shuffle", tmp_path, [None], {})
    assert sorted(index for ids, _ in after for index in ids[0]) == list(range(NUM_SAMPLES))


def test_a_stream_without_state_is_refused_or_read_again(tmp_path: Path) -> None:
    before = run_ranks(train_and_save, 2, "stream", tmp_path, [2], {})
    with pytest.raises(RankError, match=r"cannot resume after 24 samples.*data\.resume_stream"):
        run_ranks(load_and_train, 2, "stream", tmp_path, [None], {})
    after = run_ranks(load_and_train, 3, "stream", tmp_path, [None], {"data": {"resume_stream": "replay"}})
    seen_once(before, after)


def prefetch_and_save(world: World, folder: Path) -> Any:
    """Take a batch that is not trained on, then save: it has not been seen."""
    training = Training(world, "workers", folder)
    training.epoch(2)
    iterator = iter(training.loader)
    taken: list[int] = []
    for _ in range(2):
        indices, values = next(iterator)
        training.accelerator.backward(training.model(values).square().mean())
        training.optimizer.step()
        taken += indices.tolist()
    next(iterator)
    training.accelerator.save_state()
    training.accelerator.close()
    return [taken], {}


def test_a_batch_that_was_only_read_is_seen_after_the_resume(tmp_path: Path) -> None:
    before = run_ranks(prefetch_and_save, 2, tmp_path)
    after = run_ranks(load_and_train, 2, "workers", tmp_path, [None], {})
    seen_once(before, after)


def skip(world: World, folder: Path) -> Any:
    training = Training(world, "shuffle", folder)
    whole = [index for indices, _ in training.loader for index in indices.tolist()]
    torch.manual_seed(0)
    first = [index for indices, _ in training.loader for index in indices.tolist()]
    torch.manual_seed(0)
    skipped = training.accelerator.skip_first_batches(training.loader, 2)
    rest = [index for indices, _ in skipped for index in indices.tolist()]
    lengths = len(skipped), len(training.loader)
    training.accelerator.close()
    return whole, first, rest, lengths


@pytest.mark.parametrize("size", [1, 2])
def test_skipped_batches_are_the_first_ones(size: int, tmp_path: Path) -> None:
    for whole, first, rest, lengths in run_ranks(skip, size, tmp_path):
        assert sorted(whole) != whole
        assert first[12:] == rest
        assert lengths[0] == lengths[1] - 2


class Written(Samples):
    """Writes each sample's id to a file of this process when it is read; nothing is read ahead here."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        with self.path.open("a") as lines:
            lines.write(f"{index}\n")
        return super().__getitem__(index)


def train_on_written(world: World, folder: Path, log: Path, kill_at: int | None) -> None:
    """Train two epochs, save in the background after each step, and die without a word after one of them.

    The log of each rank has the ids of a step's samples, as the dataset wrote them, and then the step's number.
    """
    torch.manual_seed(world.rank)  # what ranks drew before does not matter
    log.mkdir(exist_ok=True)
    dataset = Written(log / str(world.rank))
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(dataset, batch_size=6, shuffle=True)
    config = {"checkpoint": {"dir": str(folder), "resume": "auto"}}
    accelerator = Accelerator(world=world, cpu=True, config=config, batch="global", seed=3)
    accelerator.prepare(model, optimizer, loader)
    for _ in range(2):
        for _, values in loader:
            accelerator.backward(model(values).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            step = accelerator.components.stepper.num_steps
            with dataset.path.open("a") as lines:
                lines.write(f"step {step}\n")
            accelerator.save_state(blocking=False)
            if step == kill_at and world.rank == kill_at % world.size:
                os.kill(os.getpid(), signal.SIGKILL)
    accelerator.end_run()
    accelerator.close()


def read_logs(log: Path) -> dict[int, list[int]]:
    """Return the ids of each step that was made, of all ranks."""
    steps: dict[int, list[int]] = {}
    for path in log.iterdir():
        ids: list[int] = []
        for line in path.read_text().splitlines():
            if line.startswith("step "):
                steps.setdefault(int(line[5:]), []).extend(ids)
                ids = []
            else:
                ids.append(int(line))
    return steps


@pytest.mark.parametrize("loading", [nightly(1), 2, nightly(3), 4])
@pytest.mark.parametrize("saved", SOME_SIZES)
def test_after_a_kill_nothing_is_lost_and_nothing_repeated(saved: int, loading: int, tmp_path: Path) -> None:
    per_epoch = -(-NUM_SAMPLES // 6)
    kill_at = random.Random(f"{saved} {loading}").randint(2, 2 * per_epoch - 1)
    with pytest.raises(RankError):
        run_ranks(train_on_written, saved, tmp_path / "runs", tmp_path / "before", kill_at)
    run_ranks(train_on_written, loading, tmp_path / "runs", tmp_path / "after", None)
    before, after = read_logs(tmp_path / "before"), read_logs(tmp_path / "after")
    # Steps that were made and not saved died with the weights that they led to.
    made = {step: ids for step, ids in before.items() if step < min(after)} | after
    assert sorted(made) == list(range(1, 2 * per_epoch + 1))
    for epoch in range(2):
        seen = Counter(index for step in range(per_epoch) for index in made[epoch * per_epoch + step + 1])
        assert seen == Counter(range(NUM_SAMPLES)), f"epoch {epoch}: samples were lost or repeated"


class Few(Samples):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length


def train_few(world: World, folder: Path, length: int, num_epochs: int, loads: bool) -> list[list[int]]:
    torch.manual_seed(0)
    loader = DataLoader(Few(length), batch_size=2)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerator = Accelerator(world=world, cpu=True, config={"checkpoint": {"dir": str(folder)}})
    accelerator.prepare(model, optimizer, loader)
    if loads:
        accelerator.load_state()
    epochs: list[list[int]] = []
    for number in range(num_epochs):
        epochs.append([])
        for indices, values in loader:
            accelerator.backward(model(values).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            share = accelerator.components.stepper.window.share
            epochs[-1] += indices[: share.num_valid].tolist() if share else []
            if not loads and number == num_epochs - 1:
                break
    if not loads:
        accelerator.save_state()
    accelerator.close()
    return epochs


@pytest.mark.parametrize(("saved", "loading"), [nightly(4, 4), nightly(4, 1), (1, 4), (3, 2)])
def test_fewer_samples_than_ranks_and_none_at_all(saved: int, loading: int, tmp_path: Path) -> None:
    lengths = (0, 1, 3, 5)
    before, after = (
        run_ranks(each, size, train_few, {length: (tmp_path / str(length), length, 2, loads) for length in lengths})
        for size, loads in ((saved, False), (loading, True))
    )
    for length in lengths:
        assert sorted(index for found in after for index in found[length][1]) == list(range(length))
        resumed = [found[length][-1] for found in before] + [found[length][0] for found in after]
        assert sorted(index for ids in resumed for index in ids) == list(range(length))
