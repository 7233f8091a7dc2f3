"""Detection of transforms of `torch.func` and of derivatives in forward mode."""

from __future__ import annotations

from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad


def is_in_transform() -> bool:
    """Return whether code runs in a transform, such as `vmap`, whose tensors have no memory, or in forward mode."""
    return peek_interpreter_stack() is not None or forward_ad._current_level >= 0
