import gc
import logging
import weakref

import pytest
import torch

from accel_nb import find_executable_batch_size
from accel_nb.accelerator.process.memory_release import is_out_of_memory
from accel_nb.errors import MisuseError


def allocate_too_much():
    torch.empty(2**50, dtype=torch.float64)


def fits_below(limit, tried):
    def train(batch_size, *args):
        tried.append(batch_size)
        if batch_size > limit:
            allocate_too_much()
        return batch_size, *args

    return train


def test_the_batch_is_halved_until_it_fits_and_each_try_is_said(caplog):
    tried = []
    train = find_executable_batch_size(fits_below(20, tried), starting_batch_size=100)

    with caplog.at_level(logging.WARNING):
        assert train("a") == (12, "a")
    assert tried == [100, 50, 25, 12]
    assert [record.getMessage() for record in caplog.records] == [
        f"train: batch size {size} ran out of memory, trying {size // 2}" for size in (100, 50, 25)
    ]


def test_decorated_with_options_it_takes_its_own_way_down():
    tried = []

    @find_executable_batch_size(starting_batch_size=10, reduce_batch_size_fn=lambda size: size - 3)
    def train(batch_size, extra):
        tried.append(batch_size)
        if batch_size > 5:
            raise MemoryError
        return extra

    assert train(extra=3) == 3
    assert tried == [10, 7, 4]
    assert train.__name__ == "train"


def test_the_global_batch_is_kept_by_accumulating():
    tried = []

    @find_executable_batch_size(starting_batch_size=60, keep_global_batch=True)
    def train(batch_size, gradient_accumulation_steps):
        tried.append((batch_size, gradient_accumulation_steps))
        if batch_size > 14:
            allocate_too_much()
        return batch_size * gradient_accumulation_steps

    assert train() == 60
    assert tried == [(60, 1), (30, 2), (15, 4), (6, 10)]


def test_a_probe_finds_the_largest_that_fits():
    tried, probed = [], []
    train = find_executable_batch_size(fits_below(90, tried), 128, probe=fits_below(90, probed))
    assert 84 <= train()[0] <= 90
    assert len(tried) == 1
    assert len(probed) < 8

    whole = find_executable_batch_size(fits_below(200, tried := []), 128, probe=fits_below(200, []))
    assert whole() == (128,)

    @find_executable_batch_size(starting_batch_size=12, keep_global_batch=True, probe=fits_below(4, []))
    def kept(batch_size, gradient_accumulation_steps):
        return batch_size, gradient_accumulation_steps

    assert kept() == (4, 3)


def test_a_failed_try_holds_no_memory():
    held = []

    @find_executable_batch_size(starting_batch_size=2)
    def train(batch_size):
        activations = torch.ones(batch_size)
        held.append(weakref.ref(activations))
        if batch_size == 2:
            gc.disable()
            raise torch.OutOfMemoryError("CUDA out of memory.")
        assert held[0]() is None

    try:
        train()
    finally:
        gc.enable()
    assert len(held) == 2


def test_nothing_fits():
    tried = []
    with pytest.raises(MisuseError, match="batch size of 1, and there is none smaller") as raised:
        find_executable_batch_size(fits_below(0, tried), 5)()
    assert tried == [5, 2, 1]
    assert "16 bits" in str(raised.value)


def test_other_errors_are_not_retried():
    calls = []

    @find_executable_batch_size
    def train(batch_size):
        calls.append(batch_size)
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes do not match"):
        train()
    assert calls == [128]


def test_parameters_that_do_not_fit_are_refused():
    with pytest.raises(MisuseError, match=r"<lambda>\(model\) must begin with the parameter batch_size"):
        find_executable_batch_size(lambda model: 1)
    with pytest.raises(MisuseError, match="batch_size, gradient_accumulation_steps"):
        find_executable_batch_size(lambda batch_size: 1, keep_global_batch=True)
    train = find_executable_batch_size(lambda batch_size, model: 1)
    with pytest.raises(MisuseError, match="passes batch_size, so leave these out"):
        train(128, "model")
    with pytest.raises(MisuseError, match="leave these out"):
        train("model", batch_size=1)
    for size in (0, 1.5, True):
        with pytest.raises(MisuseError, match="at least 1"):
            find_executable_batch_size(lambda batch_size: 1, size)
    with pytest.raises(MisuseError, match="leave reduce_batch_size_fn out"):
        find_executable_batch_size(starting_batch_size=2, reduce_batch_size_fn=lambda n: 1, keep_global_batch=True)
    stuck = find_executable_batch_size(fits_below(0, []), 4, lambda size: size)
    with pytest.raises(MisuseError, match="returned 4; it must return a smaller"):
        stuck()


class Trainer:
    def loop(self, batch_size, scale):
        return batch_size * scale


def test_a_method_can_be_decorated():
    assert find_executable_batch_size(Trainer().loop, 4)(2) == 8


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
        (MemoryError(), True),
    ],
)
def test_errors_about_memory_are_known(error, expected):
    assert is_out_of_memory(error) is expected
