"""Ranks that are threads, one of which runs at a time, and loaders that tests shard among them."""

import json
import random
import threading
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from accel_nb.config.sections import DataOptions
from accel_nb.data.loader import shard_loader
from accel_nb.runtime import rng
from accel_nb.runtime.world import World
from tests.support.loops import Loops


class RankGone(Exception):
    """Raised in a rank that waits in a collective that another rank does not call."""


class TurnScheduler:
    """Runs one rank at a time, from collective to collective, each with random generators of its own."""

    def __init__(self, size):
        self.size = size
        self.turn = 0
        self.condition = threading.Condition()
        self.waiting = {}  # rank -> (operation, value)
        self.results = {}  # rank -> what its collective returned
        self.gone = set()
        self.num_calls = 0
        self.states = [rng.capture() for _ in range(size)]

    def acquire(self, rank):
        with self.condition:
            assert self.condition.wait_for(lambda: self.turn == rank, timeout=60), "the turn of this rank never came"
        rng.restore(self.states[rank])

    def release(self, rank):
        self.states[rank] = rng.capture()
        with self.condition:
            free = [other for other in range(self.size) if other not in self.gone and other not in self.waiting]
            if not free and self.waiting:
                self._answer()
                free = list(range(self.size))
                free = [other for other in free if other not in self.gone]
            self.turn = free[0] if free else None
            self.condition.notify_all()

    def _answer(self):
        operations = {operation for operation, _ in self.waiting.values()}
        if self.gone or len(operations) > 1:
            self.results = dict.fromkeys(
                self.waiting, RankGone(f"{sorted(self.gone)} are gone, others do {operations}")
            )
        else:
            values = [value for _, (_, value) in sorted(self.waiting.items())]
            self.results = dict.fromkeys(self.waiting, values)
        self.waiting = {}

    def call(self, rank, operation, value):
        self.num_calls += 1
        self.waiting[rank] = (operation, value)
        self.release(rank)
        self.acquire(rank)
        result = self.results[rank]
        if isinstance(result, RankGone):
            raise result
        return result


class FakeComm:
    def __init__(self, scheduler, rank):
        self.scheduler = scheduler
        self.world = World(rank=rank, size=scheduler.size, local_rank=rank, local_size=scheduler.size)

    def all_gather(self, tensor):
        return [value.clone() for value in self.scheduler.call(self.world.rank, "all_gather", tensor)]

    def broadcast(self, tensor, source=0):
        values = self.scheduler.call(self.world.rank, "broadcast", tensor.clone())
        assert len({(value.shape, value.dtype) for value in values}) == 1
        return tensor.copy_(values[source])

    def scatter(self, tensor, parts, source=0):
        values = self.scheduler.call(self.world.rank, "scatter", None if parts is None else [p.clone() for p in parts])
        return tensor.copy_(values[source][self.world.rank])

    def broadcast_json(self, value, source=0):
        return json.loads(json.dumps(self.scheduler.call(self.world.rank, "broadcast_json", value)[source]))


def run_threads(size, body):
    """Run ``body(comm)`` on each rank; return the results, or raise the first error that is not a consequence."""
    scheduler = TurnScheduler(size)
    results, errors = [None] * size, []

    def run(rank):
        scheduler.acquire(rank)
        try:
            results[rank] = body(FakeComm(scheduler, rank))
        except BaseException as error:
            errors.append(error)
        finally:
            scheduler.gone.add(rank)
            scheduler.release(rank)

    with rng.fork_rng():
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(90)
    run_threads.num_calls = scheduler.num_calls
    causes = [error for error in errors if not isinstance(error, RankGone)] or errors
    if causes:
        raise causes[0]
    return results


@dataclass
class Setup(Loops):
    """A sharded loader, with a record of the shares that it reports."""

    comm: FakeComm
    batch: str = "global"
    training: bool = True
    options: DataOptions | None = None
    coords: tuple | None = None
    transfer: object = None

    def __post_init__(self):
        super().__init__()

    def shard(self, loader):
        return shard_loader(
            loader,
            comm=self.comm,
            batch=self.batch,
            device="cpu",
            observer=self,
            options=self.options,
            coords=self.coords,
            transfer=self.transfer,
        )

    def is_training(self):
        return self.training

    def read(self, loader):
        """One epoch: per batch the samples and the share."""
        seen = [(flat(batch), self.shares[-1]) for batch in loader]
        assert len(seen) <= len(self.shares)
        return seen


def flat(batch):
    while isinstance(batch, list | tuple) and len(batch) == 1:
        batch = batch[0]
    return batch.tolist() if isinstance(batch, torch.Tensor) else list(batch)


def numbers(count):
    return TensorDataset(torch.arange(count))


def merged(per_rank, num_steps):
    """The global batches that the ranks trained on together, fillers left out."""
    return [
        [sample for rank in per_rank for sample in ([] if rank[step][1].is_filler else rank[step][0])]
        for step in range(num_steps)
    ]


def check_shares(per_rank):
    steps = {len(rank) for rank in per_rank}
    assert len(steps) == 1, "ranks made a different number of steps"
    for step in range(steps.pop()):
        shares = [rank[step][1] for rank in per_rank]
        assert len({share.total_samples for share in shares}) == 1
        assert sum(share.num_samples for share in shares) == shares[0].total_samples
        assert {share.is_last for share in shares} == {step == len(per_rank[0]) - 1}
        for rank in per_rank:
            samples, mine = rank[step]
            assert mine.is_filler == (mine.num_samples == 0)
            assert len(samples) == (mine.num_samples or 1)


def plain_run(make, epochs=2, seed=11):
    with rng.fork_rng():
        rng.set_seed(seed)
        loader = make()
        seen = [[flat(batch) for batch in loader] for _ in range(epochs)]
        return seen, rng.capture()


def equal_states(one, other):
    return all(torch.equal(state, other[name]) for name, state in one.items())


class Squares(Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return torch.tensor(index)


class Foreign(Sampler):
    """A sampler that draws lazily from three generators and has no length."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        for _ in range(self.count):
            yield (
                random.randrange(self.count) + int(torch.randint(self.count, ())) + np.random.randint(3)
            ) % self.count


class OwnBatchSampler(BatchSampler):
    """A batch sampler of the user, which counts its epochs."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch


LOADERS = {
    "in order": lambda **kw: DataLoader(numbers(23), batch_size=5, **kw),
    "shuffled": lambda **kw: DataLoader(numbers(23), batch_size=5, shuffle=True, **kw),
    "own generator": lambda **kw: DataLoader(
        numbers(23), batch_size=5, shuffle=True, generator=torch.Generator().manual_seed(3), **kw
    ),
    "sampler's generator": lambda **kw: DataLoader(
        numbers(23), 5, sampler=RandomSampler(range(23), generator=torch.Generator().manual_seed(3)), **kw
    ),
    "with replacement": lambda **kw: DataLoader(
        numbers(23), 5, sampler=RandomSampler(range(23), True, 90, torch.Generator().manual_seed(3)), **kw
    ),
    "weighted": lambda **kw: DataLoader(numbers(23), 5, sampler=WeightedRandomSampler([1.0] * 22 + [9.0], 31), **kw),
    "subset": lambda **kw: DataLoader(numbers(23), 5, sampler=SubsetRandomSampler(range(4, 20)), **kw),
    "drop last": lambda **kw: DataLoader(numbers(23), batch_size=5, shuffle=True, drop_last=True, **kw),
    "batch sampler": lambda **kw: DataLoader(
        numbers(23), batch_sampler=BatchSampler(RandomSampler(range(23)), 4, False), **kw
    ),
    "foreign batch sampler": lambda **kw: DataLoader(
        numbers(23), batch_sampler=OwnBatchSampler(RandomSampler(range(23)), 4, False), **kw
    ),
    "uneven batches": lambda **kw: DataLoader(numbers(23), batch_sampler=[[0], [1, 2, 3, 4, 5], [6, 7], [8]], **kw),
    "sampler of batches": lambda **kw: DataLoader(
        torch.arange(23), batch_size=None, sampler=BatchSampler(RandomSampler(range(23)), 4, False), **kw
    ),
    "ready batches": lambda **kw: DataLoader([torch.arange(k, k + 5) for k in range(0, 40, 5)], batch_size=None, **kw),
    "shuffled ready batches": lambda **kw: DataLoader(
        [torch.arange(k, k + 5) for k in range(0, 40, 5)], batch_size=None, shuffle=True, **kw
    ),
    "foreign sampler": lambda **kw: DataLoader(numbers(23), batch_size=5, sampler=Foreign(23), **kw),
    "foreign, ready batches": lambda **kw: DataLoader(
        [torch.arange(k, k + 5) for k in range(0, 40, 5)], batch_size=None, sampler=Foreign(8), **kw
    ),
    "smaller than the world": lambda **kw: DataLoader(numbers(2), batch_size=5, shuffle=True, **kw),
    "empty": lambda **kw: DataLoader(numbers(0), batch_size=5, **kw),
}


class Stream(IterableDataset):
    """A stream that shuffles at the start and draws during the epoch, both from the global generators."""

    def __init__(self, count, has_length):
        self.count = count
        if has_length:
            self.__class__ = SizedStream

    def __iter__(self):
        order = torch.randperm(self.count).tolist()
        random.shuffle(order)
        for index in order:
            yield torch.tensor(index * 100 + np.random.randint(100))


class SizedStream(Stream):
    def __len__(self):
        return self.count


EVEN = DataOptions(even_batches=True)


class Counted(IterableDataset):
    """A stream of ``0 ... count - 1`` that records the numbers read."""

    def __init__(self, count):
        self.count = count
        self.read = []

    def __iter__(self):
        for index in range(self.count):
            self.read.append(index)
            yield torch.tensor(index)


def valid(per_rank, step):
    return [sample for rank in per_rank for sample in rank[step][0][: rank[step][1].num_valid]]
