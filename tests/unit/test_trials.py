"""Comparison of the results of a trial."""

import torch

from accel_nb.strategies.trials import is_close


def test_results_without_a_difference_are_compared_exactly() -> None:
    mask = torch.tensor([True, False])
    assert is_close(mask, mask.clone(), 1e-9)
    assert not is_close(mask, ~mask, 1e-9)
    assert not is_close(torch.tensor([0], dtype=torch.uint8), torch.tensor([255], dtype=torch.uint8), 1.0)
