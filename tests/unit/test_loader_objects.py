"""Sharded loaders as objects: copies, pickles, settings that change, subclasses."""

import copy
import pickle

import cloudpickle
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    TensorDataset,
)

from accel_nb.data.loader import is_sharded, shard_loader, unshard_loader
from accel_nb.errors import MisuseError
from tests.support.thread_ranks import (
    Setup,
    Squares,
    check_shares,
    merged,
    numbers,
    run_threads,
)


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


def test_only_loaders_that_are_not_divided_yet_are_accepted():
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
