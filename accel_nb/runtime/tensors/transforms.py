"""Detection of tensors in transforms of `torch.func`."""

from __future__ import annotations

import torch
from torch import Tensor


def is_transformed(tensor: Tensor) -> bool:
    """Return whether a tensor stands for others in a transform of `torch.func`, such as `vmap`: it has no memory."""
    if tensor.layout is not torch.strided:
        return False
    try:
        tensor.data_ptr()
    except RuntimeError:
        return True
    return False
