"""Detection of user code that receives all calls inside of models, or the tensors that they save.

It may be a mode, such as a counter of operations, a hook on all modules, hooks on saved tensors, or a profiler.
"""

from __future__ import annotations

import cProfile
import sys
from collections.abc import Callable
from typing import Any

from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.nn.modules.module import (
    _global_backward_hooks,
    _global_backward_pre_hooks,
    _global_forward_hooks,
    _global_forward_pre_hooks,
)
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

_HOOKS = (_global_forward_pre_hooks, _global_forward_hooks, _global_backward_pre_hooks, _global_backward_hooks)
_PACKAGE = "accel_nb."


def has_modes() -> bool:
    """Return whether a mode is active that receives the calls of functions or operators; a default device is none."""
    modes = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]
    return any(not (isinstance(mode, DeviceContext) or type(mode).__module__.startswith(_PACKAGE)) for mode in modes)


def global_hooks() -> list[Callable[..., Any]]:
    """Return the hooks on the calls of all modules, except this package's."""
    found = [hook for hooks in _HOOKS for hook in hooks.values()]
    return [hook for hook in found if not (getattr(hook, "__module__", None) or "").startswith(_PACKAGE)]


def has_saved_tensor_hooks() -> bool:
    """Return whether hooks other than torch's and this package's receive the tensors saved for a backward pass."""
    hooks = _top_saved_tensors_default_hooks(True)
    return hooks is not None and not (getattr(hooks[0], "__module__", None) or "").startswith(("torch.", _PACKAGE))


def has_profiler() -> bool:
    """Return whether a profiler receives the calls that another one cannot replace for a while."""
    profiler = sys.getprofile()
    return not (profiler is None or callable(profiler) or isinstance(profiler, cProfile.Profile))
