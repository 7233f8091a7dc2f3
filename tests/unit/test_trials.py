"""Trials of a division: threads and the comparison of results."""

import threading

import pytest
import torch

from accel_nb.strategies import trials
from accel_nb.strategies.trials import is_close


def test_results_without_a_difference_are_compared_exactly() -> None:
    mask = torch.tensor([True, False])
    assert is_close(mask, mask.clone(), 1e-9)
    assert not is_close(mask, ~mask, 1e-9)
    assert not is_close(torch.tensor([0], dtype=torch.uint8), torch.tensor([255], dtype=torch.uint8), 1.0)


def test_a_thread_that_computes_too_long_is_no_disagreement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "_TIMEOUT_S", 0.05)
    waited = threading.Event()

    def compute(index: int, comm: trials.ThreadCommunicator) -> None:
        if index:
            waited.wait(10)
        try:
            comm.all_gather(torch.ones(1))
        finally:
            waited.set()

    with pytest.raises(RuntimeError, match="computed for more than"):
        trials.run_threads(2, compute)


def test_a_thread_that_exchanges_less_is_a_disagreement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "_TIMEOUT_S", 0.05)
    with pytest.raises(RuntimeError, match="different exchanges"):
        trials.run_threads(2, lambda index, comm: index or comm.all_gather(torch.ones(1)))
