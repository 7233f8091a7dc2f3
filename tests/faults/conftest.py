"""The helper that forks ranks lives as long as the session: it exists before a test looks for what it left behind."""

from __future__ import annotations

import pytest
import torch

from tests.ranks.launch import start_launcher


@pytest.fixture(scope="session", autouse=True)
def rank_launcher() -> None:
    start_launcher()
    # torch sets a variable of its own when its compiler is first imported, which an optimizer does.
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1).step()
