"""Sharded loaders, by ranks that are threads: only one runs at a time, each with random generators of its own."""

import copy
import gc
import pickle
import random
import threading
from dataclasses import dataclass
from functools import partial

import cloudpickle
import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from accel_nb.config.sections import DataOptions
from accel_nb.data.loader import BatchShare, is_sharded, shard_loader, unshard_loader
from accel_nb.errors import MisuseError
from accel_nb.runtime import rng
from accel_nb.runtime.world import World
from tests.support.loops import Loops


class Cut(Exception):
    """What a waiting rank gets when another one will never come."""


class Baton:
    """Lets one rank run at a time, from collective to collective, and swaps the random generators on the way."""

    def __init__(self, size):
        self.size = size
        self.turn = 0
        self.condition = threading.Condition()
        self.waiting = {}  # rank -> (operation, value)
        self.results = {}  # rank -> what its collective returned
        self.gone = set()
        self.num_calls = 0
        self.states = [rng.capture() for _ in range(size)]

    def take(self, rank):
        with self.condition:
            assert self.condition.wait_for(lambda: self.turn == rank, timeout=60), "the baton never came"
        rng.restore(self.states[rank])

    def pass_on(self, rank):
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
            self.results = dict.fromkeys(self.waiting, Cut(f"{sorted(self.gone)} are gone, others do {operations}"))
        else:
            values = [value for _, (_, value) in sorted(self.waiting.items())]
            self.results = dict.fromkeys(self.waiting, values)
        self.waiting = {}

    def call(self, rank, operation, value):
        self.num_calls += 1
        self.waiting[rank] = (operation, value)
        self.pass_on(rank)
        self.take(rank)
        result = self.results[rank]
        if isinstance(result, Cut):
            raise result
        return result


class FakeComm:
    def __init__(self, baton, rank):
        self.baton = baton
        self.world = World(rank=rank, size=baton.size, local_rank=rank, local_size=baton.size)

    def all_gather(self, tensor):
        return [value.clone() for value in self.baton.call(self.world.rank, "all_gather", tensor)]

    def broadcast(self, tensor, source=0):
        values = self.baton.call(self.world.rank, "broadcast", tensor.clone())
        assert len({(value.shape, value.dtype) for value in values}) == 1
        return tensor.copy_(values[source])

    def scatter(self, tensor, parts, source=0):
        values = self.baton.call(self.world.rank, "scatter", None if parts is None else [p.clone() for p in parts])
        return tensor.copy_(values[source][self.world.rank])

    def broadcast_json(self, value, source=0):
        import json

        return json.loads(json.dumps(self.baton.call(self.world.rank, "broadcast_json", value)[source]))


def run_threads(size, body):
    """Run ``body(comm)`` on each rank; return the results, or raise the first error that is not a consequence."""
    baton = Baton(size)
    results, errors = [None] * size, []

    def run(rank):
        baton.take(rank)
        try:
            results[rank] = body(FakeComm(baton, rank))
        except BaseException as error:
            errors.append(error)
        finally:
            baton.gone.add(rank)
            baton.pass_on(rank)

    with rng.fork_rng():
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(90)
    run_threads.num_calls = baton.num_calls
    causes = [error for error in errors if not isinstance(error, Cut)] or errors
    if causes:
        raise causes[0]
    return results


@dataclass
class Setup(Loops):
    """A loader, sharded, with a record of what it announced."""

    comm: FakeComm
    batch: str = "global"
    training: bool = True
    options: DataOptions | None = None
    coords: tuple | None = None
    lane: object = None

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
            transfer=self.lane,
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
    """Draws lazily, from three generators, and has no length."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        for _ in range(self.count):
            yield (
                random.randrange(self.count) + int(torch.randint(self.count, ())) + np.random.randint(3)
            ) % self.count


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


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", LOADERS)
def test_global_batches_and_rank_0_random_state_are_those_of_a_plain_run(name, size):
    make = LOADERS[name]
    plain, plain_state = plain_run(make)

    def body(comm):
        rng.set_seed(11, per_rank=comm.world)
        own = rng.capture()
        setup = Setup(comm)
        loader = setup.shard(make())
        seen = [setup.read(loader) for _ in range(2)]
        return seen, own, rng.capture()

    per_rank = run_threads(size, body)

    for epoch in range(2):
        seen = [rank[0][epoch] for rank in per_rank]
        check_shares(seen)
        assert merged(seen, len(seen[0])) == plain[epoch]
        for step, batch in enumerate(plain[epoch]):
            lengths = [rank[step][1].num_samples for rank in seen]
            assert sum(lengths) == len(batch)
            assert max(lengths) - min(lengths) <= 1
    assert equal_states(per_rank[0][2], plain_state)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", [name for name in LOADERS if "foreign" not in name])
def test_ranks_in_step_with_rank_0_stay_in_step(name, size):
    def body(comm):
        rng.set_seed(11)
        setup = Setup(comm)
        setup.read(setup.shard(LOADERS[name]()))
        return rng.capture()

    states = run_threads(size, body)

    assert all(equal_states(states[0], state) for state in states[1:])


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", LOADERS)
def test_per_worker_batches_are_those_of_the_loader_merged_in_order(name, size):
    make = LOADERS[name]
    plain, _ = plain_run(make)

    def body(comm):
        rng.set_seed(11, per_rank=comm.world)
        setup = Setup(comm, batch="per-worker")
        loader = setup.shard(make())
        try:
            length = len(loader)
        except TypeError:
            length = None
        return [setup.read(loader) for _ in range(2)], length

    per_rank = run_threads(size, body)

    for epoch in range(2):
        seen = [rank[0][epoch] for rank in per_rank]
        check_shares(seen)
        groups = [plain[epoch][k : k + size] for k in range(0, len(plain[epoch]), size)]
        assert merged(seen, len(seen[0])) == [[s for batch in group for s in batch] for group in groups]
        assert per_rank[0][1] in (None, len(groups))
        for step, group in enumerate(groups):
            if len(group) == size and len({len(batch) for batch in group}) == 1:
                assert [rank[step][0] for rank in seen] == group


def test_a_short_last_group_is_split_evenly():
    def body(comm):
        setup = Setup(comm, batch="per-worker")
        return setup.read(setup.shard(DataLoader(numbers(17), batch_size=4)))

    first, second = run_threads(2, body)

    assert [samples for samples, _ in first] == [[0, 1, 2, 3], [8, 9, 10, 11], [16]]
    assert [samples for samples, _ in second] == [[4, 5, 6, 7], [12, 13, 14, 15], [16]]
    assert second[-1][1] == BatchShare(num_samples=0, total_samples=1, is_last=True, is_filler=True)


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("name", ["shuffled", "own generator", "foreign sampler", "ready batches"])
def test_worker_processes_change_nothing(name, persistent):
    make = partial(LOADERS[name], num_workers=2, persistent_workers=persistent)
    plain, plain_state = plain_run(make)

    def body(comm):
        rng.set_seed(11, per_rank=comm.world)
        setup = Setup(comm)
        loader = setup.shard(make())
        return [setup.read(loader) for _ in range(2)], rng.capture()

    per_rank = run_threads(2, body)

    for epoch in range(2):
        seen = [rank[0][epoch] for rank in per_rank]
        check_shares(seen)
        assert merged(seen, len(seen[0])) == plain[epoch]
    assert equal_states(per_rank[0][1], plain_state)


class PidAndNoise(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.tensor([torch.utils.data.get_worker_info().seed, torch.randint(2**40, ()).item()])


def test_worker_processes_persist_and_differ_from_rank_to_rank():
    def body(comm):
        rng.set_seed(11)
        setup = Setup(comm)
        loader = setup.shard(DataLoader(PidAndNoise(), batch_size=4, num_workers=2, persistent_workers=True))
        return [[row for batch in loader for row in batch.tolist()] for _ in range(2)]

    first, second = run_threads(2, body)

    for epochs in (first, second):  # the same processes: their seeds stay, their streams go on
        assert [seed for seed, _ in epochs[0]] == [seed for seed, _ in epochs[1]]
        assert {noise for _, noise in epochs[0]}.isdisjoint(noise for _, noise in epochs[1])
    assert {seed for seed, _ in first[0]}.isdisjoint(seed for seed, _ in second[0])
    assert {noise for _, noise in first[0]}.isdisjoint(noise for _, noise in second[0])


class Stream(IterableDataset):
    """Shuffles at the start and draws on the way, from global generators; ``lazily`` has no length."""

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


@pytest.mark.parametrize("dispatch", [False, True])
@pytest.mark.parametrize("has_length", [False, True])
@pytest.mark.parametrize(
    ("size", "batch", "num_workers"),
    [
        *((size, batch, 0) for size, batch in [(1, "global"), (2, "global"), (3, "global")]),
        *((size, "per-worker", 0) for size in (2, 3)),
        *((size, batch, 2) for size, batch in [(1, "global"), (2, "global"), (2, "per-worker")]),
    ],
)
def test_a_stream_is_divided_even_if_it_draws_at_random(size, batch, has_length, num_workers, dispatch):
    make = lambda: DataLoader(Stream(22, has_length), batch_size=4, num_workers=num_workers)  # noqa: E731
    plain, plain_state = plain_run(make)

    def body(comm):
        rng.set_seed(11, per_rank=comm.world)
        setup = Setup(comm, batch=batch, options=DataOptions(dispatch_batches=dispatch))
        loader = setup.shard(make())
        return [setup.read(loader) for _ in range(2)], rng.capture()

    per_rank = run_threads(size, body)

    for epoch in range(2):
        seen = [rank[0][epoch] for rank in per_rank]
        check_shares(seen)
        group = size if batch == "per-worker" else 1
        groups = [plain[epoch][k : k + group] for k in range(0, len(plain[epoch]), group)]
        assert merged(seen, len(seen[0])) == [[s for batch in group for s in batch] for group in groups]
    assert equal_states(per_rank[0][1], plain_state)


def test_a_stream_of_fields_is_sliced_in_every_field():
    class Pairs(IterableDataset):
        def __iter__(self):
            return iter([{"x": torch.ones(2) * k, "name": f"n{k}"} for k in range(5)])

    def body(comm):
        setup = Setup(comm)
        return [(batch["x"][:, 0].tolist(), batch["name"]) for batch in setup.shard(DataLoader(Pairs(), batch_size=3))]

    first, second = run_threads(2, body)

    assert first == [([0.0, 1.0], ["n0", "n1"]), ([3.0], ["n3"])]
    assert second == [([2.0], ["n2"]), ([4.0], ["n4"])]


def test_stream_batches_that_cannot_be_joined_go_whole_to_the_first_ranks():
    def pad(samples):
        return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)

    class Texts(IterableDataset):
        def __iter__(self):
            return iter([torch.full((length,), length) for length in (1, 1, 2, 2)])

    def body(comm):
        setup = Setup(comm, batch="per-worker")
        loader = setup.shard(DataLoader(Texts(), batch_size=2, collate_fn=pad))
        return [(batch.tolist(), setup.shares[-1]) for batch in loader]

    results = run_threads(3, body)

    assert results[0] == [([[1], [1]], BatchShare(2, 4, True, False))]
    assert results[1] == [([[2, 2], [2, 2]], BatchShare(2, 4, True, False))]
    assert results[2] == [([[1]], BatchShare(0, 4, True, True))]


def test_batches_of_one_object_go_to_rank_0_and_as_fillers_to_the_others():
    def body(comm):
        setup = Setup(comm)
        loader = setup.shard(DataLoader([3, 4], batch_size=None, collate_fn=lambda item: item))
        return [(item, setup.shares[-1].num_samples) for item in loader]

    assert run_threads(2, body) == [[(3, 1), (4, 1)], [(3, 0), (4, 0)]]


def test_an_evaluation_reads_the_whole_loader_on_every_rank():
    plain, plain_state = plain_run(LOADERS["shuffled"], epochs=1)

    def body(comm):
        rng.set_seed(11)
        setup = Setup(comm, batch="per-worker", training=False)
        loader = setup.shard(LOADERS["shuffled"]())
        assert len(loader) == 5
        return [flat(batch) for batch in loader], setup.shares, rng.capture()

    for seen, shares, state in run_threads(3, body):
        assert seen == plain[0]
        assert shares == []
        assert equal_states(state, plain_state)
    assert run_threads.num_calls == 0


def test_an_epoch_costs_one_collective_and_a_world_of_one_none():
    def body(comm):
        setup = Setup(comm)
        setup.read(setup.shard(LOADERS["shuffled"]()))

    run_threads(2, body)
    assert run_threads.num_calls == 2
    run_threads(1, body)
    assert run_threads.num_calls == 0


def test_leaving_an_epoch_early_and_starting_again_is_like_a_plain_run():
    def visit(loader):
        seen = []
        for _ in range(3):
            for step, batch in enumerate(loader):
                seen.append(flat(batch))
                if step == 1:
                    break
        seen.append(torch.rand(1).item())
        return seen

    with rng.fork_rng():
        rng.set_seed(11)
        plain = visit(LOADERS["with replacement"]()), visit(LOADERS["shuffled"]())

    def body(comm):
        rng.set_seed(11)
        setup = Setup(comm)
        return visit(setup.shard(LOADERS["with replacement"]())), visit(setup.shard(LOADERS["shuffled"]()))

    per_rank = run_threads(2, body)

    for number in range(2):
        first, second = (rank[number] for rank in per_rank)
        joined = [one + other for one, other in zip(first[:-1], second[:-1], strict=True)]
        assert [*joined, first[-1]] == plain[number]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_two_loaders_interleaved_and_one_nested_in_itself(num_workers):
    def visit(make):
        a, b = make("a"), make("b")
        seen = [(flat(x), flat(y)) for x, y in zip(a, b, strict=False)]
        seen += [(flat(x), flat(y)) for x in a for y in a]
        return seen

    def make_loader(name):
        return DataLoader(numbers(6 if name == "a" else 9), batch_size=4, shuffle=True, num_workers=num_workers)

    with rng.fork_rng():
        rng.set_seed(11)
        plain = visit(make_loader)

    def body(comm):
        rng.set_seed(11)
        setup = Setup(comm)
        return visit(lambda name: setup.shard(make_loader(name)))

    first, second = run_threads(2, body)

    assert [(x0 + x1, y0 + y1) for (x0, y0), (x1, y1) in zip(first, second, strict=True)] == plain


def test_nothing_is_drawn_before_its_time():
    class Watched(Sampler):
        def __init__(self):
            self.drawn = 0

        def __len__(self):
            return 6

        def __iter__(self):
            for index in range(6):
                self.drawn += 1
                yield index

    def body(comm):
        setup = Setup(comm)
        sampler = Watched()
        loader = setup.shard(DataLoader(numbers(6), batch_size=2, sampler=sampler))
        return [sampler.drawn for _ in loader]

    assert run_threads(2, body) == [[2, 4, 6], [0, 0, 0]]


def test_foreign_indices_reach_every_rank_as_they_were():
    class Keys(Dataset):
        def __getitem__(self, key):
            return f"{type(key).__name__} {key}"

    class Odd(Sampler):
        def __iter__(self):
            yield [np.int64(3), torch.tensor(4), "five", (6, "seven"), [8], None]

    def body(comm):
        setup = Setup(comm)
        loader = DataLoader(Keys(), batch_sampler=Odd(), collate_fn=list)
        return list(setup.shard(loader))

    first, second, third = run_threads(3, body)

    assert (first, second, third) == (
        [["int64 3", "Tensor 4"]],
        [["str five", "tuple (6, 'seven')"]],
        [["list [8]", "NoneType None"]],
    )


def test_an_index_that_cannot_be_sent_is_an_error_on_every_rank():
    class Odd(Sampler):
        def __iter__(self):
            yield [object(), object()]

    def body(comm):
        setup = Setup(comm)
        with pytest.raises(MisuseError, match="index of type object") as raised:
            setup.read(setup.shard(DataLoader(numbers(3), batch_sampler=Odd())))
        return str(raised.value)

    first, second = run_threads(2, body)

    assert first.startswith("the sampler yields")
    assert second.startswith("rank 0, which draws for all ranks, failed")


def test_an_error_of_rank_0s_sampler_reaches_every_rank():
    class Broken(Sampler):
        def __iter__(self):
            yield 0
            yield 1
            raise KeyError("lost")

    def body(comm):
        setup = Setup(comm)
        with pytest.raises((KeyError, MisuseError), match="lost") as raised:
            setup.read(setup.shard(DataLoader(numbers(3), batch_size=2, sampler=Broken())))
        return raised.type

    assert run_threads(2, body) == [KeyError, MisuseError]


@pytest.mark.parametrize("kind", ["map", "stream"])
def test_loaders_of_different_length_are_an_error_on_every_rank(kind):
    def body(comm):
        setup = Setup(comm)
        count = 8 + comm.world.rank
        dataset = numbers(count) if kind == "map" else SizedStream(count, True)
        with pytest.raises(MisuseError, match="different length") as raised:
            setup.read(setup.shard(DataLoader(dataset, batch_size=2)))
        return str(raised.value)

    first, second = run_threads(2, body)

    assert first == second
    assert "rank 0: " in first
    assert "8 samples" in first
    assert "9 samples" in first


def test_a_length_that_promises_too_much_is_said():
    class Boastful(Sampler):
        def __len__(self):
            return 9

        def __iter__(self):
            return iter([[0, 1], [2]])

    def body(comm):
        setup = Setup(comm)
        with pytest.warns(UserWarning, match="length of a loader is 9 batches"):
            setup.read(setup.shard(DataLoader(numbers(3), batch_sampler=Boastful())))
        return [share.is_last for share in setup.shares if share is not None]

    assert run_threads(1, body) == [[False, False]]


def test_a_failing_sample_does_not_shift_the_shares():
    class Holed(Dataset):
        def __len__(self):
            return 7

        def __getitem__(self, index):
            if index == 3:
                raise KeyError(index)
            return index

    def body(comm, num_workers):
        setup = Setup(comm)
        batches, seen = iter(setup.shard(DataLoader(Holed(), batch_size=3, num_workers=num_workers))), []
        while True:
            try:
                batch = next(batches)
            except KeyError:
                continue
            except StopIteration:
                gc.collect()  # an error out of a worker process refers to itself, and so to the loader's pipes
                return seen
            seen.append((batch.tolist(), setup.shares[-1].num_samples, setup.shares[-1].is_last))

    for num_workers in (0, 2):
        assert run_threads(1, partial(body, num_workers=num_workers)) == [[([0, 1, 2], 3, False), ([6], 1, True)]]


def test_the_loader_stays_the_same_object_and_its_copies_are_plain():
    class Mine(DataLoader):
        """My own."""

    def body(comm):
        setup = Setup(comm, batch="per-worker")
        loader = Mine(numbers(9), batch_size=2)
        assert setup.shard(loader) is loader
        assert is_sharded(loader)
        assert isinstance(loader, Mine)
        assert type(loader).__name__ == "Mine"
        assert type(loader).__doc__ == "My own."
        assert len(loader) == 3
        for twin in (copy.copy(loader), copy.deepcopy(loader)):
            assert type(twin) is Mine
            assert not is_sharded(twin)
            assert len(twin) == 5
        assert unshard_loader(loader) is loader
        assert type(loader) is Mine
        assert not is_sharded(loader)
        assert len(unshard_loader(loader)) == 5

    run_threads(2, body)


def test_a_pickled_loader_is_plain():
    def body(comm):
        loader = Setup(comm).shard(DataLoader(numbers(3), batch_size=2))
        twins = [pickle.loads(pickle.dumps(loader, protocol)) for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1)]
        twins += [pickle.loads(cloudpickle.dumps(loader))]
        return {(type(twin), len(list(twin))) for twin in twins}

    assert run_threads(1, body) == [{(DataLoader, 2)}]


def test_sharding_again_replaces_the_settings():
    def body(comm):
        loader = DataLoader(numbers(8), batch_size=2)
        Setup(comm, batch="per-worker").shard(loader)
        setup = Setup(comm)
        setup.shard(loader)
        return len(loader), [samples for samples, _ in setup.read(loader)]

    assert run_threads(2, body) == [(4, [[0], [2], [4], [6]]), (4, [[1], [3], [5], [7]])]


def test_what_is_changed_on_the_loader_later_counts():
    def body(comm):
        setup = Setup(comm)
        loader = setup.shard(DataLoader(list(range(4)), batch_size=4))
        setup.read(loader)
        loader.collate_fn = lambda samples: [-sample for sample in samples]
        return list(loader)

    assert run_threads(2, body) == [[[0, -1]], [[-2, -3]]]


def test_a_loader_class_that_changes_batches_keeps_doing_so():
    class Negative(DataLoader):
        def __iter__(self):
            for batch in super().__iter__():
                yield -batch

    def body(comm):
        setup = Setup(comm)
        return setup.read(setup.shard(Negative(Squares(7), batch_size=4, shuffle=True)))

    per_rank = run_threads(2, body)

    check_shares(per_rank)
    assert sorted(-sample for batch in merged(per_rank, 2) for sample in batch) == list(range(7))


def test_a_loader_class_that_yields_more_than_it_draws_is_an_error():
    class Twice(DataLoader):
        def __iter__(self):
            for batch in super().__iter__():
                yield batch
                yield batch

    def body(comm):
        setup = Setup(comm)
        with pytest.raises(MisuseError, match="more batches than its sampler draws"):
            setup.read(setup.shard(Twice(Squares(7), batch_size=4)))

    run_threads(2, body)


def test_batches_go_to_the_device():
    def body(comm):
        seen = []
        loader = DataLoader(TensorDataset(torch.ones(4), torch.ones(4)), batch_size=2)
        for training in (True, False):
            shard_loader(loader, comm=comm, batch="global", device="meta", observer=Setup(comm, training=training))
            seen += [tensor.device.type for batch in loader for tensor in batch]
        return [item for item in seen if isinstance(item, str)]

    assert run_threads(2, body) == [["meta"] * 8] * 2


def test_only_loaders_that_are_not_divided_yet_are_taken():
    def body(comm):
        setup = Setup(comm)
        with pytest.raises(MisuseError, match="not a list"):
            setup.shard([1, 2])
        divided = DistributedSampler(range(4), num_replicas=2, rank=comm.world.rank)
        with pytest.raises(MisuseError, match="DistributedSampler divides it among 2 ranks"):
            setup.shard(DataLoader(numbers(4), sampler=divided))
        from torch.utils.data.datapipes.iter import IterableWrapper

        with pytest.raises(MisuseError, match="datapipe"):
            setup.shard(DataLoader(IterableWrapper([1, 2])))

    run_threads(2, body)
