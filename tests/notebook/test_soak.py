"""A short version of ``tests.faults.soak``: the long one is nightly."""

from __future__ import annotations

import pytest

from tests.faults.soak import soak


@pytest.mark.nightly
def test_many_cells_leave_nothing_behind(kernel) -> None:
    growth = soak(kernel, 60)
    assert growth.descriptors <= 2, "the kernel opens one of its own now and then; a leak would be one a cell"
    assert growth.worker_descriptors == 0
    assert growth.kernel_bytes < 20_000_000
    assert growth.worker_bytes < 40_000_000
