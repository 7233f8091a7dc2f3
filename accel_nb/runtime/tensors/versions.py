"""Version counters of tensors, which in-place operations increase; tensors of ``torch.inference_mode`` have none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def version_of(tensor: Tensor) -> int:
    """Return the version counter of a tensor, or 0 if it has none."""
    return 0 if tensor.is_inference() else tensor._version


@contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Leave ``torch.inference_mode`` inside of the block, still without gradients: tensors made in it have versions."""
    import torch

    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield
