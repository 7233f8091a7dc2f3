"""Sharded loaders on real processes over gloo."""

import random

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler, TensorDataset

from accel_nb.data.loader import shard_loader
from accel_nb.data.order import BatchShare
from accel_nb.errors import MisuseError
from accel_nb.runtime import rng
from accel_nb.runtime.distributed.communicator import LocalComm, TorchComm
from accel_nb.runtime.distributed.process_group import DefaultGroup
from tests.ranks.launch import run_ranks
from tests.support.loops import Loops


def _nothing(world):
    pass


@pytest.fixture(autouse=True, scope="module")
def _rank_helper():
    """Start the helper that forks the ranks; it outlives the tests of the module."""
    run_ranks(_nothing, 1)


class Lazy(Sampler):
    def __len__(self):
        return 13

    def __iter__(self):
        for _ in range(13):
            yield random.randrange(13)


class Stream(IterableDataset):
    def __iter__(self):
        for index in torch.randperm(13).tolist():
            yield torch.tensor([index, random.randrange(1000)])


def _make(kind, num_workers):
    numbers = TensorDataset(torch.arange(13))
    settings = {"num_workers": num_workers, "persistent_workers": num_workers > 0}
    if kind == "shuffled":
        return DataLoader(numbers, batch_size=4, shuffle=True, **settings)
    if kind == "own generator":
        generator = torch.Generator().manual_seed(5)
        return DataLoader(numbers, batch_size=4, shuffle=True, generator=generator, **settings)
    if kind == "batch sampler":
        return DataLoader(numbers, batch_sampler=BatchSampler(RandomSampler(range(13)), 3, True), **settings)
    if kind == "foreign":
        return DataLoader(numbers, batch_size=4, sampler=Lazy(), **settings)
    return DataLoader(Stream(), batch_size=4, **settings)


def _read(comm, kind, batch, num_workers, epochs):
    rng.set_seed(2, per_rank=comm.world)
    shares = []
    loader = shard_loader(
        _make(kind, num_workers),
        comm=comm,
        batch=batch,
        device="cpu",
        observer=Loops(shares),
    )
    seen = []
    for _ in range(epochs):
        for item in loader:
            samples = item[0] if isinstance(item, list) else item
            seen.append((samples.tolist(), shares[-1]))
    return seen, {name: state.tolist() for name, state in rng.capture().items()}


BATCHES = ("global", "per-worker")
KINDS = ("shuffled", "own generator", "batch sampler", "foreign", "stream")


def _read_on_rank(world, num_workers):
    comm = TorchComm(world, DefaultGroup.adopt(world))
    return {(kind, batch): _read(comm, kind, batch, num_workers, 2) for kind in KINDS for batch in BATCHES}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_two_processes_see_what_one_sees(num_workers):
    first, second = run_ranks(_read_on_rank, 2, num_workers)
    for kind in KINDS:
        with rng.fork_rng():
            plain = _read(LocalComm(), kind, "global", num_workers, 2)
        for batch in BATCHES:
            _check_reads(plain, first[kind, batch], second[kind, batch])


def _check_reads(one_process, first, second):
    plain, plain_state = one_process
    steps = list(zip(first[0], second[0], strict=True))
    together = [sample for pair in steps for samples, share in pair if not share.is_filler for sample in samples]
    assert together == [sample for samples, _ in plain for sample in samples]
    for (_, one), (_, other) in steps:
        assert one.total_samples == other.total_samples == one.num_samples + other.num_samples
        assert one.is_last == other.is_last
    assert sum(one.is_last for (_, one), _ in steps) == 2
    assert first[1] == plain_state


def _read_fewer_than_ranks(world):
    shares: list[BatchShare | None] = []
    loader = shard_loader(
        DataLoader(torch.arange(2), batch_size=8),
        comm=TorchComm(world, DefaultGroup.adopt(world)),
        batch="global",
        device="cpu",
        observer=Loops(shares),
    )
    batches = [batch.tolist() for batch in loader]
    assert shares.pop() is None, "the end is announced"
    return batches, shares


def test_a_rank_without_a_share_gets_a_filler():
    assert run_ranks(_read_fewer_than_ranks, 3) == [
        ([[0]], [BatchShare(1, 2, True, False)]),
        ([[1]], [BatchShare(1, 2, True, False)]),
        ([[0]], [BatchShare(0, 2, True, True)]),
    ]


def _read_different_lengths(world):
    loader = shard_loader(
        DataLoader(torch.arange(4 + 2 * world.rank), batch_size=2),
        comm=TorchComm(world, DefaultGroup.adopt(world)),
        batch="global",
        device="cpu",
        observer=Loops(),
    )
    with pytest.raises(MisuseError, match="different length") as raised:
        list(loader)
    return str(raised.value)


def test_loaders_of_different_length_are_named_on_every_rank():
    messages = run_ranks(_read_different_lengths, 2)

    for message in messages:
        assert "rank 0: 2 batches, 4 samples" in message
        assert "rank 1: 3 batches, 6 samples" in message


def _iterate_on_one(world):
    comm = TorchComm(world, DefaultGroup.adopt(world))
    if world.is_main:  # as long as what the other rank sends: gloo ends a process that gets more than it waits for
        comm.all_gather(torch.zeros(7 * 8 + torch.get_rng_state().numel(), dtype=torch.uint8))
        return
    loader = shard_loader(
        DataLoader(torch.arange(4), batch_size=2),
        comm=comm,
        batch="global",
        device="cpu",
        observer=Loops(),
    )
    with pytest.raises(MisuseError, match=r"rank 0 makes another call.*below `if accelerator.is_main_process`"):
        list(loader)


def test_a_rank_that_is_elsewhere_is_named():
    run_ranks(_iterate_on_one, 2)
