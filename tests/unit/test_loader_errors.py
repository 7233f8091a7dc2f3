"""Sharded loaders: errors of samplers and datasets, and differences between ranks."""

import gc
import os
from functools import partial

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    random_split,
)

from accel_nb.errors import MisuseError
from accel_nb.runtime.distributed.communicator import LocalComm
from tests.support.thread_ranks import (
    Setup,
    SizedStream,
    Squares,
    check_shares,
    merged,
    numbers,
    run_threads,
)


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


def test_a_length_that_is_too_large_is_reported():
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


def test_a_subset_drawn_differently_on_each_rank_is_an_error_that_says_how_to_draw_it():
    def body(comm):
        torch.manual_seed(comm.world.rank)
        part, _ = random_split(numbers(40), [30, 10])
        with pytest.raises(MisuseError, match="subset of the dataset") as raised:
            Setup(comm).read(Setup(comm).shard(DataLoader(part, batch_size=4)))
        return str(raised.value)

    for message in run_threads(2, body):
        assert "differs between rank 0 and rank 1" in message
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


def test_an_index_error_of_the_dataset_is_raised_unchanged():
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
