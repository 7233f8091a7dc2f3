"""Calls of `torch.utils.checkpoint` in a forward pass: the backward pass then computes parts of the model again."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch.utils.checkpoint

_FILE = torch.utils.checkpoint.__file__


class CheckpointCalls:
    """Whether code in the block of `observed_checkpoints` has called a function of `torch.utils.checkpoint`."""

    has_called = False


@contextmanager
def observed_checkpoints() -> Iterator[CheckpointCalls]:
    """Record whether code in the block calls a function of `torch.utils.checkpoint`, by whatever name."""
    calls, earlier = CheckpointCalls(), sys.getprofile()

    def observe(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename == _FILE:
            calls.has_called = True

    sys.setprofile(observe)
    try:
        yield calls
    finally:
        sys.setprofile(earlier)
