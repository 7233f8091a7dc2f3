"""Sharded loaders: the division of batches, random states, worker processes and epochs that end early."""

from functools import partial

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    Sampler,
)

from accel_nb.data.order import BatchShare
from accel_nb.runtime import rng
from tests.support.thread_ranks import (
    LOADERS,
    Setup,
    check_shares,
    equal_states,
    flat,
    merged,
    numbers,
    plain_run,
    run_threads,
)


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
        if name == "drop last":
            groups = [group for group in groups if len(group) == size]
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


@pytest.mark.parametrize(("training", "length"), [(True, 5), (False, 15)])
def test_an_iterator_has_the_length_of_its_loader(training, length):
    def body(comm):
        loader = Setup(comm, batch="per-worker", training=training).shard(DataLoader(range(30), batch_size=2))
        return len(loader), len(iter(loader))

    assert run_threads(3, body) == [(length, length)] * 3


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


def test_no_index_is_drawn_before_it_is_needed():
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
