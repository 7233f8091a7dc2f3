"""Version counters of tensors, which in-place operations increase."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def version_of(tensor: Tensor) -> int:
    """Return the version counter of a tensor; 0 for one made in ``torch.inference_mode``, which has none."""
    return 0 if tensor.is_inference() else tensor._version
