import json
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel_nb.runtime import rng
from accel_nb.runtime.world import World


@pytest.fixture(autouse=True)
def _own_streams():
    with rng.fork_rng():
        yield


def _draw():
    return (
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.randn()),
        torch.rand(3).tolist(),
    )


def test_the_same_seed_gives_the_same_numbers_everywhere():
    rng.set_seed(7)
    first = _draw()
    rng.set_seed(7)

    assert _draw() == first


def test_ranks_get_streams_of_their_own_and_rank_0_the_plain_one():
    rng.set_seed(7)
    plain = _draw()
    seeds = [rng.set_seed(7, per_rank=World(rank=rank, size=3, local_rank=rank, local_size=3)) for rank in range(3)]
    assert len(set(seeds)) == 3
    rng.set_seed(7, per_rank=World(rank=0, size=3, local_rank=0, local_size=3))

    assert _draw() == plain


@given(seed=st.integers(-(2**63), 2**64 - 1), key=st.integers() | st.text())
def test_derived_seeds_are_valid_and_depend_on_every_key(seed, key):
    derived = rng.derive_seed(seed, key)

    assert 0 <= derived < 2**63
    assert derived == rng.derive_seed(seed, key)
    assert derived != rng.derive_seed(seed, key, key)
    torch.Generator().manual_seed(derived)


def test_derived_seeds_stay_what_they_were():
    assert rng.derive_seed(0, "loader", 1) == 1965293020685579744
    assert rng.derive_seed(1, 1) != rng.derive_seed(1, "1")


def test_a_captured_state_goes_on_where_it_was():
    rng.set_seed(3)
    _draw()  # leaves a spare normal number in Python's and NumPy's generators
    states = rng.capture()
    first = _draw()
    _draw()
    rng.restore(states)

    assert _draw() == first


def test_states_survive_json_and_packing():
    rng.set_seed(3)
    _draw()
    states = rng.capture()
    reported = json.loads(json.dumps({name: state.tolist() for name, state in states.items()}))
    packed = rng.unpack(rng.pack(states), states)
    first = _draw()

    rng.restore({name: torch.tensor(reported[name], dtype=state.dtype) for name, state in states.items()})
    assert _draw() == first
    rng.restore(packed)
    assert _draw() == first


def test_only_the_parts_asked_for_are_captured():
    assert set(rng.capture(parts=("torch",))) == {"torch"}
    assert "device" not in rng.capture("cpu")


def test_a_fork_leaves_no_trace_even_after_an_error():
    rng.set_seed(5)
    other = rng.capture()
    expected = _draw()
    before = rng.capture()

    def fail():
        with rng.fork_rng(other):
            assert _draw() == expected
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    after = rng.capture()
    assert all(torch.equal(state, after[name]) for name, state in before.items())


def test_a_fork_of_one_part_keeps_the_others_going():
    state = {"torch": torch.Generator().manual_seed(1).get_state()}
    rng.set_seed(5)
    before = rng.capture()
    with rng.fork_rng(state):
        _draw()
    after = rng.capture()

    assert torch.equal(before["torch"], after["torch"])
    assert not torch.equal(before["python"], after["python"])


@pytest.mark.parametrize("name", ["python", "numpy"])
def test_a_state_of_another_shape_is_refused(name):
    states = rng.capture()
    states[name] = states[name][:-1]

    with pytest.raises(ValueError, match=f"'{name}' has shape"):
        rng.restore(states)


def test_a_python_state_of_another_version_is_refused():
    states = rng.capture()
    states["python"][0] = 2

    with pytest.raises(ValueError, match="version 2; known is 3"):
        rng.restore(states)


def test_another_numpy_generator_is_refused():
    old = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(1))
    try:
        with pytest.raises(ValueError, match="'PCG64'"):
            rng.capture()
    finally:
        np.random.set_bit_generator(old)


def test_present_states_are_taken_up_as_they_were_and_a_draw_of_any_generator_shows_in_the_digest():
    rng.set_seed(7)
    draws = (random.random, lambda: random.gauss(0, 1), np.random.rand, np.random.randn, lambda: torch.rand(1))
    for draw in draws:
        before = rng.capture_cpu()
        expected = _draw()
        rng.restore_cpu(before)
        assert _draw() == expected

        rng.restore_cpu(before)
        assert rng.digest(rng.capture_cpu()) == rng.digest(before)
        draw()
        assert rng.digest(rng.capture_cpu()) != rng.digest(before)
