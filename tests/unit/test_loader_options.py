"""Sharded loaders under options: even shares, seeded orders, data coordinates."""

from collections import deque

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    TensorDataset,
)

from accel_nb.config.sections import DataOptions
from accel_nb.errors import MisuseError
from accel_nb.runtime import rng
from accel_nb.runtime.distributed.communicator import LocalComm
from tests.support.thread_ranks import (
    EVEN,
    LOADERS,
    Counted,
    Setup,
    SizedStream,
    Squares,
    Stream,
    merged,
    numbers,
    run_threads,
    valid,
)


@pytest.mark.parametrize("dispatch", [None, True])
@pytest.mark.parametrize("kind", ["map", "stream", "ready batches"])
@pytest.mark.parametrize("batch", ["global", "per-worker"])
@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 12, 13, 23])
@pytest.mark.parametrize("size", [2, 3])
def test_even_shares_are_equally_long_and_only_repeat_at_the_end(kind, batch, count, size, dispatch):
    def make():
        if kind == "map":
            return DataLoader(numbers(count), batch_size=4)
        if kind == "stream":
            return DataLoader(Counted(count), batch_size=4)
        return DataLoader([torch.arange(k, min(k + 4, count)) for k in range(0, count, 4)], batch_size=None)

    def body(comm):
        setup = Setup(comm, batch=batch, options=DataOptions(even_batches=True, dispatch_batches=dispatch))
        return setup.read(setup.shard(make()))

    per_rank = run_threads(size, body)

    assert len({len(rank) for rank in per_rank}) == 1
    group = 4 * (size if batch == "per-worker" else 1)
    for step in range(len(per_rank[0])):
        shares = [rank[step][1] for rank in per_rank]
        lengths = {len(rank[step][0]) for rank in per_rank}
        assert lengths == {shares[0].num_samples}
        assert len({(share.num_samples, share.total_samples, share.is_last) for share in shares}) == 1
        assert shares[0].total_samples == size * shares[0].num_samples
        assert not any(share.is_filler for share in shares)
        assert valid(per_rank, step) == list(range(step * group, min((step + 1) * group, count)))
        repeated = [s for rank in per_rank for s in rank[step][0][rank[step][1].num_valid :]]
        first = list(range(min(group, count)))
        assert repeated == (first * len(repeated))[: len(repeated)]
    if kind != "ready batches" and batch == "per-worker":
        lengths = [len(batch) for batch, _ in per_rank[0]]
        # One rank that reads for all repeats only until each has equally many; else batches are filled up.
        is_dispatched = dispatch or kind == "stream"
        assert lengths[-1] == (-(-((count - 1) % group + 1) // size) if is_dispatched else 4)
        assert set(lengths[:-1]) <= {4}


@pytest.mark.parametrize("options", [EVEN, DataOptions()])
def test_a_dropped_tail_is_what_is_short_of_a_batch_for_each_rank(options):
    def body(comm):
        setup = Setup(comm, batch="per-worker", options=options)
        loader = setup.shard(DataLoader(numbers(23), batch_size=4, drop_last=True))
        stream = setup.shard(DataLoader(Counted(23), batch_size=4, drop_last=True))
        return len(loader), setup.read(loader), [samples for samples, _ in setup.read(stream)]

    (length, first, own), (_, second, others) = run_threads(2, body)

    assert length == 2
    assert merged([first, second], 2) == [list(range(8)), list(range(8, 16))]
    assert first[-1][1].is_last
    assert own == [[0, 1, 2, 3], [8, 9, 10, 11]]
    assert others == [[4, 5, 6, 7], [12, 13, 14, 15]]


def test_even_shares_of_batches_that_cannot_be_joined_are_an_error_with_the_way_out():
    class Texts(IterableDataset):
        def __iter__(self):
            return iter([torch.full((length,), length) for length in (1, 2, 3)])

    def body(comm):
        setup = Setup(comm, batch="per-worker", options=DataOptions(even_batches=True, dispatch_batches=False))
        with pytest.raises(MisuseError, match="set even_batches to False"):
            setup.read(setup.shard(DataLoader(Texts(), batch_size=1)))

    run_threads(2, body)


def test_an_empty_loader_stays_empty():
    def body(comm):
        setup = Setup(comm, options=EVEN)
        dispatched = Setup(comm, options=DataOptions(dispatch_batches=True))
        return setup.read(setup.shard(DataLoader(numbers(0), batch_size=4))) + dispatched.read(
            dispatched.shard(DataLoader(Counted(0), batch_size=4))
        )

    assert run_threads(3, body) == [[], [], []]


# --- the seeded order, and the epoch ---

SEEDED = DataOptions(use_seedable_sampler=True, data_seed=5)


@pytest.mark.parametrize("dispatch", [None, True])
@pytest.mark.parametrize(
    "name", ["shuffled", "batch sampler", "foreign batch sampler", "sampler of batches", "drop last", "own generator"]
)
def test_the_seeded_order_depends_on_seed_and_epoch_only(name, dispatch):
    options = SEEDED.model_copy(update={"dispatch_batches": dispatch})

    def epochs(comm, seed, visits):
        rng.set_seed(seed, per_rank=comm.world)
        setup = Setup(comm, options=options)
        loader = setup.shard(LOADERS[name]())
        seen = []
        for epoch in visits:
            if epoch is not None:
                loader.set_epoch(epoch)
            seen.append(setup.read(loader))
        return seen

    def joined(per_rank, number):
        seen = [rank[number] for rank in per_rank]
        return [sample for batch in merged(seen, len(seen[0])) for sample in batch]

    with rng.fork_rng():
        alone = [epochs(LocalComm(), 1, [None, None, None])]
    two = run_threads(2, lambda comm: epochs(comm, 2, [None, 2, None]))

    orders = [joined(alone, number) for number in range(3)]
    assert orders[0] != orders[1] != orders[2]
    assert [joined(two, number) for number in range(2)] == [orders[0], orders[2]]


@pytest.mark.parametrize("dispatch", [None, True])
def test_without_any_seed_rank_0s_generator_gives_it(dispatch):
    options = DataOptions(use_seedable_sampler=True, dispatch_batches=dispatch)

    def body(comm):
        torch.manual_seed(comm.world.rank)
        setup = Setup(comm, options=options)
        return setup.read(setup.shard(LOADERS["shuffled"]()))

    per_rank = run_threads(2, body)

    assert sorted(s for batch in merged(per_rank, len(per_rank[0])) for s in batch) == list(range(23))


def test_an_epoch_reaches_sampler_batch_sampler_and_dataset():
    class Listening:
        def __init__(self):
            self.epochs = []

        def set_epoch(self, epoch):
            self.epochs.append(epoch)

    class MySampler(Listening, Sampler):
        def __iter__(self):
            return iter(range(4))

        def __len__(self):
            return 4

    class MyBatches(Listening, BatchSampler):
        def __init__(self, sampler):
            Listening.__init__(self)
            BatchSampler.__init__(self, sampler, 2, False)

    class MyData(Listening, Squares):
        def __init__(self):
            Listening.__init__(self)
            Squares.__init__(self, 4)

    class MyStream(Listening, IterableDataset):
        def __iter__(self):
            return iter([1])

    class MyLoader(Listening, DataLoader):
        def __init__(self, *args, **kwargs):
            Listening.__init__(self)
            DataLoader.__init__(self, *args, **kwargs)

    sampler, data, stream = MySampler(), MyData(), MyStream()
    batches = MyBatches(sampler)
    loader = MyLoader(data, batch_sampler=batches)
    setup = Setup(LocalComm())
    setup.shard(DataLoader(data, batch_sampler=batches)).set_epoch(3)
    setup.shard(loader).set_epoch(6)  # the class decides what it sets
    setup.shard(DataLoader(stream)).set_epoch(4)
    setup.shard(DataLoader(numbers(3), sampler=sampler)).set_epoch(5)

    assert (sampler.epochs, batches.epochs, data.epochs, stream.epochs, loader.epochs) == (
        [3, 5],
        [3],
        [3],
        [4],
        [6],
    )


def test_a_sampler_whose_iterator_is_empty_at_first_is_started_once():
    class Drawn(deque):
        """An iterator with a length: the number of batches that were drawn."""

        def __iter__(self):
            return self

        def __next__(self):
            if len(self) == 2:
                raise StopIteration
            self.append(len(self))
            return [self[-1]]

    class Batches(Sampler):
        started = ()

        def __iter__(self):
            self.started = (*self.started, Drawn())
            return self.started[-1]

    sampler = Batches()
    loader = Setup(LocalComm()).shard(DataLoader(numbers(2), batch_sampler=sampler))
    assert [batch[0].tolist() for batch in loader] == [[0], [1]]
    assert len(sampler.started) == 1


def test_own_attributes_of_a_loader_precede_those_of_sharded_loaders():
    loader = DataLoader(numbers(11), batch_size=2)
    loader.remainder = 7

    Setup(LocalComm()).shard(loader)
    assert (loader.remainder, loader.total_batch_size) == (7, 2)
    loader.remainder = loader.total_batch_size = 8
    assert (loader.remainder, loader.total_batch_size) == (8, 8)


def test_the_attributes_of_sharded_loaders():
    def body(comm):
        setup = Setup(comm, batch="per-worker")
        loader = setup.shard(DataLoader(numbers(11), batch_size=2))
        before = loader.end_of_dataloader
        ends = [loader.end_of_dataloader for _ in loader]
        facts = loader.total_batch_size, loader.total_dataset_length, loader.remainder
        whole = setup.shard(DataLoader(numbers(12), batch_size=2))
        stream = setup.shard(DataLoader(Counted(4), batch_size=2))
        return before, ends, facts, whole.remainder, stream.remainder

    assert run_threads(2, body) == [(False, [False, False, True], (4, 11, 3), 0, -1)] * 2


# --- data coordinates ---


@pytest.mark.parametrize("dispatch", [None, True])
@pytest.mark.parametrize("kind", ["map", "stream"])
@pytest.mark.parametrize("batch", ["global", "per-worker"])
def test_ranks_with_the_same_coordinates_read_the_same(kind, batch, dispatch):
    def body(comm):
        rng.set_seed(7, per_rank=comm.world)
        index = comm.world.rank // 2
        setup = Setup(comm, batch=batch, coords=(index, 2), options=DataOptions(dispatch_batches=dispatch))
        make = LOADERS["shuffled"] if kind == "map" else lambda: DataLoader(Stream(23, False), batch_size=5)
        return setup.read(setup.shard(make()))

    per_rank = run_threads(4, body)

    assert per_rank[0] == per_rank[1]
    assert per_rank[2] == per_rank[3]
    pair = [per_rank[0], per_rank[2]]
    samples = [sample for batch in merged(pair, len(pair[0])) for sample in batch]
    assert len(samples) == 23
    assert len(set(samples)) == 23
    assert {share.total_samples for _, share in pair[0]} <= {5, 10, 3}


def test_ranks_that_all_share_a_model_read_everything_in_rank_0s_order():
    def body(comm):
        rng.set_seed(7, per_rank=comm.world)
        setup = Setup(comm, coords=(0, 1))
        return setup.read(setup.shard(LOADERS["shuffled"]()))

    first, second = run_threads(2, body)

    assert first == second
    assert [share.num_samples for _, share in first] == [5, 5, 5, 5, 3]


def test_worlds_of_one_read_plainly_whatever_the_options():
    options = DataOptions(dispatch_batches=True, even_batches=True)
    setup = Setup(LocalComm(), options=options)

    assert [s for s, _ in setup.read(setup.shard(DataLoader(SizedStream(5, True), batch_size=2)))]
    loader = setup.shard(
        DataLoader(TensorDataset(torch.arange(5)), batch_sampler=BatchSampler(RandomSampler(range(5)), 2, False))
    )
    assert sorted(s for samples, _ in setup.read(loader) for s in samples) == list(range(5))


# --- bad input ---
