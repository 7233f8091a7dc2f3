"""Observation of the values that a model's code reads."""

from __future__ import annotations

import threading
from typing import Any

import torch

from accel_nb.accelerator.model_division.value_reads import observed_reads


def test_lists_arrays_and_numbers_are_observed() -> None:
    found: list[Any] = []
    number, values = torch.tensor(1.5), torch.tensor([1, 2])
    with observed_reads(found.append):
        assert number.tolist() == 1.5
        assert values.tolist() == [1, 2]
        assert values.numpy().tolist() == [1, 2]
    assert 1.5 in found
    assert [1, 2] in found


def test_reads_of_another_thread_are_not_those_of_the_model() -> None:
    found: list[Any] = []
    values = torch.tensor([1, 2])
    with observed_reads(found.append):
        reader = threading.Thread(target=lambda: (values.tolist(), values.numpy()))
        reader.start()
        reader.join()
    assert not found
    assert "tolist" not in vars(torch.Tensor)
