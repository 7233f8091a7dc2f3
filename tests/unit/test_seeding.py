import gc
import random
import weakref

import numpy as np
import pytest
import torch

import accel_nb
from accel_nb import release_memory, set_seed, synchronize_rng_states
from accel_nb.errors import MisuseError
from accel_nb.runtime import rng


@pytest.fixture(autouse=True)
def _own_streams():
    deterministic = torch.are_deterministic_algorithms_enabled()
    with rng.fork_rng():
        yield
    torch.use_deterministic_algorithms(deterministic)


def test_a_seed_and_a_step_say_what_is_drawn():
    def draw():
        return random.random(), np.random.rand(), torch.rand(2).tolist()

    assert set_seed(3) == 3
    plain = draw()
    set_seed(3, step=5)
    fifth = draw()
    set_seed(3, step=6)
    assert draw() not in (plain, fifth)
    set_seed(3, step=5)
    assert draw() == fifth
    set_seed(3, device_specific=True)  # alone, and so rank 0
    assert draw() == plain


def test_deterministic_algorithms_are_switched_on():
    set_seed(1)
    assert not torch.are_deterministic_algorithms_enabled()
    set_seed(1, deterministic=True)
    assert torch.are_deterministic_algorithms_enabled()


def test_states_are_kept_where_there_is_nobody_else():
    set_seed(1)
    synchronize_rng_states(["python", "numpy", "torch"])
    assert torch.initial_seed() == 1


@pytest.mark.parametrize(
    ("types", "message"),
    [(["tpu"], "no random states called tpu"), ("cuda", "no CUDA generator"), ("generator", "without a generator")],
)
def test_states_that_are_not_there_are_refused(types, message):
    with pytest.raises(MisuseError, match=message):
        synchronize_rng_states(types)


def test_released_objects_are_gone():
    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    gone = weakref.ref(model)
    gc.disable()
    try:
        model.loop = [model]
        model, other = release_memory(model, other)
        assert (model, other) == (None, None)
    finally:
        gc.enable()
    release_memory()
    assert gone() is None


def test_every_public_name_is_there():
    for name in accel_nb.__all__:
        assert getattr(accel_nb, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        accel_nb.nothing
