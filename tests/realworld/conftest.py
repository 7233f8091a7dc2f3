"""A kernel for each group of cases."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.realworld.notebook import Notebook
from tests.support.kernel import running_kernel


@pytest.fixture(scope="module")
def notebook(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """A kernel with the extension loaded, for the group that is the fixture's parameter."""
    with running_kernel() as kernel:
        output = kernel.run("%load_ext accel_nb")
        assert output.error is None, output.traceback
        yield Notebook(kernel, tmp_path_factory.mktemp(request.param))
