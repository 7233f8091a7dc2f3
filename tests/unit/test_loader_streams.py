"""Sharded loaders of iterable datasets, also of those that divide themselves."""

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    IterableDataset,
)

from accel_nb.config.sections import DataOptions
from accel_nb.data.order import BatchShare
from accel_nb.errors import MisuseError
from accel_nb.runtime import rng
from tests.support.nightly import nightly
from tests.support.thread_ranks import (
    EVEN,
    Setup,
    Stream,
    check_shares,
    equal_states,
    merged,
    plain_run,
    run_threads,
    valid,
)


@pytest.mark.parametrize("dispatch", [False, True])
@pytest.mark.parametrize("has_length", [False, True])
@pytest.mark.parametrize(
    ("size", "batch", "num_workers"),
    [
        *((size, batch, 0) for size, batch in [(1, "global"), (2, "global"), (3, "global")]),
        *((size, "per-worker", 0) for size in (2, 3)),
        (1, "global", 2),
        *(nightly(2, batch, 2) for batch in ("global", "per-worker")),
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


def test_own_files_are_not_filled_with_repeats():
    def body(comm):
        setup = Setup(comm, batch="per-worker", options=EVEN)
        return setup.read(setup.shard(DataLoader(Files(FILES), batch_size=2)))

    per_rank = run_threads(2, body)

    for step in range(len(per_rank[0])):
        shares = [rank[step][1] for rank in per_rank]
        assert {share.total_samples for share in shares} == {sum(share.num_samples for share in shares)}
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
