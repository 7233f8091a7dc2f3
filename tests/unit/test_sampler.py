"""Orders that are functions of seed and epoch."""

import pytest
import torch
from torch.utils.data import RandomSampler

from accel_nb.data.sampler import SeedableRandomSampler, set_epoch
from accel_nb.errors import MisuseError
from accel_nb.runtime import rng


def test_an_epoch_is_a_permutation_that_seed_and_epoch_determine():
    with rng.fork_rng():
        first = SeedableRandomSampler(range(20), seed=3)
        orders = [list(first) for _ in range(3)]
        torch.manual_seed(99)
        other = SeedableRandomSampler(range(20), seed=3)
        other.set_epoch(2)
        again = list(other)

    assert all(sorted(order) == list(range(20)) for order in orders)
    assert orders[0] != orders[1] != orders[2]
    assert again == orders[2]
    assert list(SeedableRandomSampler(range(20), seed=4)) != orders[0]


def test_no_global_generator_is_read_or_changed():
    with rng.fork_rng():
        before = rng.capture()
        list(SeedableRandomSampler(range(9), seed=1))
        after = rng.capture()

    assert all(torch.equal(state, after[name]) for name, state in before.items())


@pytest.mark.parametrize(
    "plain",
    [
        RandomSampler(range(7)),
        RandomSampler(range(7), num_samples=3),
        RandomSampler(range(7), num_samples=17),
        RandomSampler(range(7), replacement=True),
        RandomSampler(range(7), replacement=True, num_samples=30),
    ],
)
def test_as_many_are_drawn_as_by_the_sampler_that_is_replaced(plain):
    ours = SeedableRandomSampler.like(plain, seed=0)

    drawn = list(ours)

    assert len(drawn) == len(ours) == len(plain)
    assert set(drawn) <= set(range(7))
    if not plain.replacement:
        counts = [drawn.count(index) for index in range(7)]
        assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("epoch", [-1, 1.0, "2", None])
def test_an_epoch_that_is_none_is_refused(epoch):
    with pytest.raises(MisuseError, match="whole number of at least 0"):
        SeedableRandomSampler(range(3), seed=0).set_epoch(epoch)


@pytest.mark.parametrize("num_samples", [0, -1, 2.0])
def test_a_number_of_samples_that_is_none_is_refused(num_samples):
    with pytest.raises(MisuseError, match="num_samples"):
        SeedableRandomSampler(range(3), seed=0, num_samples=num_samples)


def test_an_epoch_is_reported_once_to_each_that_listens():
    reported = []

    class Listening:
        def set_epoch(self, epoch):
            reported.append((id(self), epoch))

    one, other = Listening(), Listening()
    set_epoch(4, one, None, object(), other, one)

    assert reported == [(id(one), 4), (id(other), 4)]
