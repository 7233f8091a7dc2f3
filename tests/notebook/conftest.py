"""A kernel with the extension loaded, shared by the tests of one module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.kernel import Kernel, running_kernel


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    with running_kernel() as kernel:
        output = kernel.run("%load_ext accel_nb")
        assert output.error is None, output.traceback
        yield kernel
