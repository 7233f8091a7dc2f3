"""Batches of samples of about the same length."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from accel_nb.data.collate import PaddingCollate
from accel_nb.data.length_batching import LengthBatchSampler
from accel_nb.data.loader import get_position, resume_loader
from accel_nb.errors import MisuseError
from accel_nb.runtime.distributed.communicator import LocalComm
from tests.support.thread_ranks import Setup, check_shares, merged, run_threads

LENGTHS = st.lists(st.integers(0, 40), max_size=60)


@given(lengths=LENGTHS, batch_size=st.integers(1, 9), pool=st.integers(1, 4), shuffle=st.booleans())
def test_each_sample_comes_once_and_only_the_last_batch_is_short(lengths, batch_size, pool, shuffle):
    sampler = LengthBatchSampler(lengths, batch_size=batch_size, pool=pool, shuffle=shuffle, seed=3)

    for _ in range(2):
        expected = len(sampler)
        batches = list(sampler)
        assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
        assert len(batches) == expected
        assert all(len(batch) == batch_size for batch in batches[:-1])


@given(lengths=LENGTHS, max_tokens=st.integers(44, 200), batch_size=st.none() | st.integers(1, 6))
def test_no_batch_is_above_the_budget(lengths, max_tokens, batch_size):
    sampler = LengthBatchSampler(lengths, max_tokens=max_tokens, batch_size=batch_size, multiple_of=4, pool=2)
    expected = len(sampler)

    batches = list(sampler)

    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    assert len(batches) == expected
    for batch in batches:
        longest = max(-(-lengths[index] // 4) * 4 for index in batch)
        assert longest * len(batch) <= max_tokens
        assert batch_size is None or len(batch) <= batch_size


def test_lengths_in_a_batch_are_close():
    lengths = np.random.default_rng(0).integers(1, 500, 2000)

    def padded(batches):
        return sum(len(batch) * lengths[batch].max() for batch in batches) / lengths.sum()

    mixed = [list(range(start, start + 20)) for start in range(0, 2000, 20)]

    assert padded(mixed) > 1.8
    assert padded(LengthBatchSampler(lengths, batch_size=20)) < 1.1
    assert padded(LengthBatchSampler(lengths, max_tokens=5000)) < 1.1


def test_the_order_depends_on_seed_and_epoch_only():
    lengths = torch.randint(1, 30, (50,))
    first = LengthBatchSampler(lengths, batch_size=4, seed=1, pool=2)
    orders = [list(first) for _ in range(2)]
    again = LengthBatchSampler(lengths, batch_size=4, seed=1, pool=2)
    again.set_epoch(1)

    assert list(again) == orders[1] != orders[0]
    assert list(LengthBatchSampler(lengths, batch_size=4, seed=2, pool=2)) != orders[0]
    unshuffled = LengthBatchSampler(lengths, batch_size=4, shuffle=False)
    assert list(unshuffled) == list(unshuffled)


def test_batches_follow_the_attributes_and_are_the_readers_own():
    sampler = LengthBatchSampler(range(12), batch_size=4, pool=1, seed=1)
    num_batches = len(sampler)
    sampler.shuffle = False
    plain = [list(batch) for batch in sampler]
    for batch in sampler:
        batch.reverse()

    assert num_batches == 3
    assert list(sampler) == plain == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_a_short_batch_may_be_dropped():
    assert [len(batch) for batch in LengthBatchSampler(range(10), batch_size=4, drop_last=True)] == [4, 4]


@pytest.mark.parametrize("limits", [{"batch_size": 6}, {"max_tokens": 60}])
@pytest.mark.parametrize("batch", ["global", "per-worker"])
def test_sharded_loaders_read_each_sample_once_and_send_nothing(limits, batch):
    texts = [[index] * (1 + index * 7 % 13) for index in range(41)]

    def body(comm):
        sampler = LengthBatchSampler([len(text) for text in texts], **limits, seed=2)
        setup = Setup(comm, batch=batch)
        loader = setup.shard(DataLoader(texts, batch_sampler=sampler, collate_fn=PaddingCollate(pad=-1)))
        seen = []
        for epoch in range(2):
            loader.set_epoch(epoch)
            seen.append([([row[0] for row in item.tolist()], setup.shares[-1]) for item in loader])
        return seen

    per_rank = run_threads(3, body)

    assert run_threads.num_calls == 3 * 2
    orders = []
    for epoch in range(2):
        seen = [rank[epoch] for rank in per_rank]
        check_shares(seen)
        orders.append([s for batch in merged(seen, len(seen[0])) for s in batch])
        assert sorted(orders[-1]) == list(range(41))
    assert orders[0] != orders[1]


def test_a_resumed_epoch_ends_with_its_own_last_batch():
    def loader():
        sampler = LengthBatchSampler([1 + index * 7 % 13 for index in range(41)], max_tokens=30, pool=1, seed=2)
        return setup.shard(DataLoader(range(41), batch_sampler=sampler))

    setup = Setup(LocalComm())
    first = loader()
    counts = [len(setup.read(first)) for _ in range(4)]
    assert len(set(counts)) > 1
    for epoch in range(1, 4):
        interrupted = loader()
        interrupted.batch_sampler.set_epoch(epoch)
        for _ in zip(range(3), interrupted, strict=False):
            pass

        again = loader()
        resume_loader(again, get_position(interrupted, includes_latest=True))
        seen = [share.is_last for _, share in setup.read(again)]
        assert seen == [False] * (counts[epoch] - 4) + [True]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs batch_size, max_tokens or both"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": True}, "batch_size=True"),
        ({"max_tokens": -1}, "max_tokens=-1"),
        ({"batch_size": 2, "pool": 0}, "pool=0"),
        ({"max_tokens": 8, "drop_last": True}, "no batch is short"),
        ({"max_tokens": 2}, "sample 2 is 3 tokens long"),
    ],
)
def test_limits_that_cannot_be_are_refused(options, message):
    with pytest.raises(MisuseError, match=message):
        LengthBatchSampler([1, 2, 3], **options)


@pytest.mark.parametrize("lengths", [[-1], [1.5], [[1]], ["ab"]])
def test_lengths_that_are_none_are_refused(lengths):
    with pytest.raises(MisuseError, match="one whole number of at least 0 for each sample"):
        LengthBatchSampler(lengths, batch_size=2)
