"""Sharded loaders under options: even shares, seeded orders, data coordinates, dispatch, own files, copies ahead."""

import gc
import os
import weakref

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)

from accel_nb.config.sections import DataOptions
from accel_nb.data.loader import BatchShare
from accel_nb.errors import MisuseError
from accel_nb.runtime import rng
from accel_nb.runtime.distributed.communicator import LocalComm
from tests.unit.test_loader import (
    LOADERS,
    Setup,
    SizedStream,
    Squares,
    Stream,
    check_shares,
    flat,
    merged,
    numbers,
    run_threads,
)

EVEN = DataOptions(even_batches=True)


class Counted(IterableDataset):
    """A stream of ``0 ... count - 1`` that remembers what was read."""

    def __init__(self, count):
        self.count = count
        self.read = []

    def __iter__(self):
        for index in range(self.count):
            self.read.append(index)
            yield torch.tensor(index)


# --- even shares ---


def valid(per_rank, step):
    return [sample for rank in per_rank for sample in rank[step][0][: rank[step][1].num_valid]]


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
        assert {len(rank[step][0]) for rank in per_rank for step in range(len(rank))} == {4}


def test_even_shares_of_dropped_tails_drop_what_is_short():
    def body(comm):
        setup = Setup(comm, batch="per-worker", options=EVEN)
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
@pytest.mark.parametrize("name", ["shuffled", "batch sampler", "sampler of batches", "drop last", "own generator"])
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
            self.told = []

        def set_epoch(self, epoch):
            self.told.append(epoch)

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
    setup.shard(loader).set_epoch(3)
    setup.shard(DataLoader(stream)).set_epoch(4)
    setup.shard(DataLoader(numbers(3), sampler=sampler)).set_epoch(5)

    assert (sampler.told, batches.told, data.told, stream.told, loader.told) == ([3, 5], [3], [3], [4], [3])


def test_what_loaders_tell_about_themselves():
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


# --- dispatch ---

DISPATCH = DataOptions(dispatch_batches=True)


def test_only_rank_0_reads_what_is_dispatched():
    def body(comm):
        data = Counted(22)
        setup = Setup(comm, batch="per-worker", options=DISPATCH)
        return setup.read(setup.shard(DataLoader(data, batch_size=4))), data.read

    (first, read), *others = run_threads(3, body)

    assert read == list(range(22))
    assert all(not read for _, read in others)
    per_rank = [first, *(seen for seen, _ in others)]
    assert merged(per_rank, 2) == [list(range(12)), list(range(12, 22))]
    assert first[-1][1].is_last


def test_streams_are_dispatched_where_each_workers_batch_is_meant_and_nothing_else_is_said():
    def body(comm):
        reads = []
        for batch, options in [
            ("per-worker", None),
            ("global", None),
            ("per-worker", DataOptions(dispatch_batches=False)),
        ]:
            data = Counted(8)
            setup = Setup(comm, batch=batch, options=options)
            setup.read(setup.shard(DataLoader(data, batch_size=4)))
            reads.append(len(data.read))
        return reads

    assert run_threads(2, body) == [[8, 8, 8], [0, 8, 8]]


def test_dispatched_batches_are_what_rank_0_read_of_any_type():
    generator = torch.Generator().manual_seed(0)
    dtypes = [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]

    def batch(size):
        fields = {str(dtype): (torch.randn(size, 3, generator=generator) * 3).to(dtype) for dtype in dtypes}
        return {
            **fields,
            "empty": torch.zeros(size, 0),
            "pair": (np.arange(size) * 2, [f"n{k}" for k in range(size)]),
            "same": torch.tensor(4.5),
            "note": None,
            "transposed": torch.arange(size * 2).reshape(2, size).T,
        }

    whole = [batch(5), batch(5), batch(4)]

    def body(comm):
        setup = Setup(comm, options=DISPATCH)
        return list(setup.shard(DataLoader(whole, batch_size=None, collate_fn=lambda item: item)))

    first, second = run_threads(2, body)

    for number, original in enumerate(whole):
        parts = first[number], second[number]
        cut = 3 if number < 2 else 2
        for name in [*map(str, dtypes), "empty", "transposed"]:
            assert torch.equal(torch.cat([part[name] for part in parts]), original[name])
            assert parts[0][name].shape[0] == cut
            assert parts[1][name].dtype == original[name].dtype
        for part, rows in zip(parts, (slice(0, cut), slice(cut, None)), strict=True):
            array, names = part["pair"]
            assert isinstance(part["pair"], tuple)
            assert isinstance(array, np.ndarray)
            assert array.tolist() == original["pair"][0][rows].tolist()
            assert names == original["pair"][1][rows]
            assert part["note"] is None
            assert part["same"] == 4.5


def test_a_step_is_one_message_unless_a_share_outgrows_the_last_ones():
    def body(comm, sizes):
        setup = Setup(comm, options=DISPATCH)
        batches = [torch.arange(size) for size in sizes]
        seen = setup.read(setup.shard(DataLoader(batches, batch_size=None)))
        return [samples for samples, _ in seen]

    def calls(sizes):
        first, second = run_threads(2, lambda comm: body(comm, sizes))
        assert [a + b for a, b in zip(first, second, strict=True)] == [list(range(size)) for size in sizes]
        return run_threads.num_calls // 2

    # The table of ranks and the end come on top.
    assert calls([4] * 10) == 10 + 2
    assert calls([4, 6, 2, 9, 4]) == 5 + 2
    assert calls([4, 5000, 5000, 4, 4]) == 5 + 2 + 2


def test_an_error_of_what_rank_0_reads_is_raised_on_every_rank():
    class Broken(IterableDataset):
        def __iter__(self):
            yield torch.tensor(0)
            yield torch.tensor(1)
            raise KeyError("lost")

    def body(comm):
        setup = Setup(comm, options=DISPATCH)
        with pytest.raises((KeyError, MisuseError), match="lost") as raised:
            setup.read(setup.shard(DataLoader(Broken(), batch_size=2)))
        return raised.type, str(raised.value)

    (kind, _), (other, message) = run_threads(2, body)

    assert (kind, other) == (KeyError, MisuseError)
    assert "rank 0, which reads for all ranks (dispatch_batches), failed: KeyError" in message


@pytest.mark.parametrize("item", [object(), {1: 2}, {"x": {3}}, np.array(["x", object()])])
def test_what_cannot_be_sent_is_an_error_on_every_rank_that_says_what_can(item):
    def body(comm):
        setup = Setup(comm, options=DISPATCH)
        with pytest.raises(MisuseError, match=r"cannot be sent.*dispatch_batches to False") as raised:
            list(setup.shard(DataLoader([item], batch_size=None, collate_fn=lambda item: item)))
        return str(raised.value)

    messages = run_threads(2, body)

    assert all("numpy" in m or "object" in m or type(item).__name__ in m or "set" in m for m in messages)


def test_a_dispatched_epoch_left_early_can_be_started_again():
    def body(comm):
        setup = Setup(comm, batch="per-worker", options=DISPATCH)
        loader = setup.shard(DataLoader(Counted(16), batch_size=2))
        for _ in loader:
            break
        return setup.read(loader)

    per_rank = run_threads(2, body)

    assert [s for batch in merged(per_rank, 4) for s in batch] == list(range(16))


# --- datasets that divide themselves ---


class Files(IterableDataset):
    """Has files and gives out some of them, as streaming datasets do."""

    def __init__(self, files, has_divided=False):
        self.files = files
        self.has_divided = has_divided
        self.epoch = 0

    @property
    def num_shards(self):
        return len(self.files)

    def shard(self, num_shards, index):
        part = Files(self.files[index::num_shards], True)
        part.epoch = self.epoch
        return part

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        for file in self.files:
            for number in file:
                yield torch.tensor(number + 1000 * self.epoch)


FILES = [[0, 1, 2], [10, 11], [20], [30, 31, 32, 33, 34]]


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("size", [2, 3])
def test_each_rank_reads_files_of_its_own_and_every_sample_counts_once(size, num_workers):
    def body(comm):
        setup = Setup(comm, batch="per-worker")
        loader = setup.shard(DataLoader(Files(FILES), batch_size=2, num_workers=num_workers))
        loader.set_epoch(1)
        return setup.read(loader)

    per_rank = run_threads(size, body)

    steps = len(per_rank[0])
    assert {len(rank) for rank in per_rank} == {steps}
    for rank, seen in enumerate(per_rank):
        own = [sample for samples, share in seen if not share.is_filler for sample in samples]
        assert own == [number + 1000 for file in FILES[rank::size] for number in file]
    for step in range(steps):
        shares = [rank[step][1] for rank in per_rank]
        assert {share.total_samples for share in shares} == {sum(share.num_samples for share in shares)}
        assert {share.is_last for share in shares} == {step == steps - 1}


def test_own_files_with_even_shares():
    def body(comm):
        setup = Setup(comm, batch="per-worker", options=EVEN)
        return setup.read(setup.shard(DataLoader(Files(FILES), batch_size=2)))

    per_rank = run_threads(2, body)

    for step in range(len(per_rank[0])):
        assert len({len(rank[step][0]) for rank in per_rank}) == 1
        assert len({rank[step][1].num_samples for rank in per_rank}) == 1
    everything = [s for step in range(len(per_rank[0])) for s in valid(per_rank, step)]
    assert sorted(everything) == sorted(number for file in FILES for number in file)


def test_too_few_files_are_dispatched_instead():
    def body(comm):
        setup = Setup(comm, batch="per-worker")
        return setup.read(setup.shard(DataLoader(Files(FILES[:2]), batch_size=2)))

    per_rank = run_threads(3, body)

    assert [s for batch in merged(per_rank, 1) for s in batch] == [0, 1, 2, 10, 11]


def test_an_empty_file_is_an_error_that_says_what_to_do():
    def body(comm):
        setup = Setup(comm, batch="per-worker")
        loader = setup.shard(DataLoader(Files([[1, 2, 3], []]), batch_size=2))
        if comm.world.rank == 1:
            with pytest.raises(MisuseError, match="dispatch_batches"):
                setup.read(loader)
        else:
            next(iter(loader))

    run_threads(2, body)


# --- copies ahead of time ---


class RecordingTransfer:
    """Copies nothing, and remembers when it was asked."""

    def __init__(self, log):
        self.log = log

    def start(self, batch):
        self.log.append(("start", flat(batch)))
        return ("ticket", batch)

    def finish(self, ticket):
        kind, batch = ticket
        assert kind == "ticket"
        self.log.append(("finish", flat(batch)))
        return batch


def test_the_next_batch_is_on_its_way_while_one_is_trained_on():
    log = []
    setup = Setup(LocalComm(), lane=RecordingTransfer(log))
    for batch in setup.shard(DataLoader(numbers(5), batch_size=2)):
        log.append(("train", flat(batch), setup.shares[-1]))  # noqa: PERF401

    assert log == [
        ("start", [0, 1]),
        ("start", [2, 3]),
        ("finish", [0, 1]),
        ("train", [0, 1], BatchShare(2, 2, False, False)),
        ("start", [4]),
        ("finish", [2, 3]),
        ("train", [2, 3], BatchShare(2, 2, False, False)),
        ("finish", [4]),
        ("train", [4], BatchShare(1, 1, True, False)),
    ]
    assert setup.shares[-1] is None


@pytest.mark.parametrize("name", LOADERS)
def test_copies_ahead_change_nothing_in_what_is_read(name):
    def body(comm, lane):
        rng.set_seed(11, per_rank=comm.world)
        setup = Setup(comm, lane=lane)
        return setup.read(setup.shard(LOADERS[name]()))

    assert run_threads(2, lambda comm: body(comm, RecordingTransfer([]))) == run_threads(
        2, lambda comm: body(comm, None)
    )


def test_non_blocking_off_copies_nothing_ahead():
    log = []
    setup = Setup(LocalComm(), lane=RecordingTransfer(log), options=DataOptions(non_blocking=False))
    setup.read(setup.shard(DataLoader(numbers(5), batch_size=2)))

    assert log == []


def test_an_error_ahead_comes_where_the_batch_would_have_come():
    class Holed(Squares):
        def __getitem__(self, index):
            if index == 2:
                raise KeyError(index)
            return super().__getitem__(index)

    setup = Setup(LocalComm(), lane=RecordingTransfer([]))
    batches, seen = iter(setup.shard(DataLoader(Holed(6), batch_size=2))), []
    while True:
        try:
            seen.append((flat(next(batches)), setup.shares[-1].is_last))
        except KeyError:
            seen.append("lost")
        except StopIteration:
            break

    assert seen == [([0, 1], False), "lost", ([4, 5], True)]


@pytest.mark.parametrize("num_samples", [None, 8])
def test_no_batch_lives_longer_than_it_is_needed(num_samples):
    """A stream is read one batch ahead at most, and a batch that the loop has dropped is gone."""
    alive = weakref.WeakSet()

    class Batch(torch.Tensor):
        pass

    def made(number):
        batch = torch.full((4,), number).as_subclass(Batch)
        alive.add(batch)
        return batch

    class Batches(IterableDataset):
        def __iter__(self):
            for number in range(8):
                yield made(number)

    if num_samples is not None:
        Batches.__len__ = lambda self: num_samples
    setup = Setup(LocalComm())
    counts = []
    batches = iter(setup.shard(DataLoader(Batches(), batch_size=None)))
    for _ in range(7):
        batch = next(batches)
        del batch
        gc.collect()
        counts.append(len(alive))

    assert max(counts) <= (1 if num_samples is None else 0)


def test_worlds_of_one_read_plainly_whatever_the_options():
    options = DataOptions(dispatch_batches=True, even_batches=True)
    setup = Setup(LocalComm(), options=options)

    assert [s for s, _ in setup.read(setup.shard(DataLoader(SizedStream(5, True), batch_size=2)))]
    loader = setup.shard(
        DataLoader(TensorDataset(torch.arange(5)), batch_sampler=BatchSampler(RandomSampler(range(5)), 2, False))
    )
    assert sorted(s for samples, _ in setup.read(loader) for s in samples) == list(range(5))


# --- bad input ---


def test_a_subset_drawn_differently_on_each_rank_is_an_error_that_says_how_to_draw_it():
    def body(comm):
        torch.manual_seed(comm.world.rank)
        part, _ = random_split(numbers(40), [30, 10])
        with pytest.raises(MisuseError, match="subset of the dataset") as raised:
            Setup(comm).read(Setup(comm).shard(DataLoader(part, batch_size=4)))
        return str(raised.value)

    for message in run_threads(2, body):
        assert "rank 1 than on rank 0" in message
        assert "manual_seed" in message


@pytest.mark.parametrize("kind", ["subset", "weights", "list"])
def test_a_sampler_with_other_samples_on_each_rank_is_an_error(kind):
    def body(comm):
        own = [comm.world.rank + index for index in range(8)]
        sampler = {
            "subset": lambda: SubsetRandomSampler(own),
            "weights": lambda: WeightedRandomSampler([float(value) for value in own], 8),
            "list": lambda: own,
        }[kind]()
        with pytest.raises(MisuseError, match="sampler"):
            Setup(comm).read(Setup(comm).shard(DataLoader(numbers(20), batch_size=4, sampler=sampler)))

    run_threads(2, body)


def test_objects_that_are_other_objects_on_each_rank_are_no_difference():
    def body(comm):
        data = [object() for _ in range(6)]
        setup = Setup(comm)
        loader = DataLoader(data, batch_sampler=[[0, 1], (2, 3), np.array([4, 5])], collate_fn=len)
        return list(setup.shard(loader))

    assert run_threads(2, body) == [[1, 1, 1]] * 2


def test_samplers_of_different_kinds_are_an_error():
    def body(comm):
        with pytest.raises(MisuseError, match="different kinds of samplers"):
            Setup(comm).read(Setup(comm).shard(DataLoader(numbers(20), batch_size=4, shuffle=comm.world.rank == 0)))

    run_threads(2, body)


def test_an_index_that_the_dataset_does_not_have_is_named():
    setup = Setup(LocalComm())
    with pytest.raises(MisuseError, match=r"index 7, and the TensorDataset has 5 samples, 0 to 4") as raised:
        setup.read(setup.shard(DataLoader(numbers(5), batch_size=2, sampler=[0, 1, 7])))
    assert isinstance(raised.value.__cause__, IndexError)


def test_an_index_error_of_the_datasets_own_stays_what_it_is():
    class Broken(Squares):
        def __getitem__(self, index):
            return [][index]

    setup = Setup(LocalComm())
    with pytest.raises(IndexError):
        setup.read(setup.shard(DataLoader(Broken(5), batch_size=2)))


def test_a_worker_process_that_dies_is_an_error():
    class Deadly(Squares):
        def __getitem__(self, index):
            if index == 3:
                os._exit(7)
            return super().__getitem__(index)

    setup = Setup(LocalComm())
    with pytest.raises(RuntimeError, match=r"worker.*exited unexpectedly"):
        setup.read(setup.shard(DataLoader(Deadly(8), batch_size=2, num_workers=1)))


def test_a_dataset_whose_length_changes_is_read_as_long_as_it_is():
    class Growing(Squares):
        pass

    def body(comm):
        setup, data = Setup(comm), Growing(5)
        loader = setup.shard(DataLoader(data, batch_size=2, shuffle=True))
        first = setup.read(loader)
        data.count = 9
        return first, setup.read(loader)

    per_rank = run_threads(2, body)

    for epoch, count in enumerate((5, 9)):
        seen = [rank[epoch] for rank in per_rank]
        check_shares(seen)
        assert sorted(s for batch in merged(seen, len(seen[0])) for s in batch) == list(range(count))
