"""Parameters of tests that only the nightly run uses."""

from __future__ import annotations

from typing import Any

import pytest


def nightly(*values: Any) -> Any:
    """Return the parameters of a test that only the nightly run uses."""
    return pytest.param(*values, marks=pytest.mark.nightly)
