"""Changes of PyTorch's groups of sharded parameters, which are gathered together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def adapt_group(group: Any, unit: nn.Module) -> None:
    """Change a group of parameters of a unit that `fully_shard` has just made.

    The sharded model does the work of its hooks of state dicts, which cannot be copied: with these entries it
    registers none.
    """
    group._module_to_pre_save_state_dict_hook_handle = {unit: None}
    group._module_to_pre_load_state_dict_hook_handle = {unit: None}
    group.wait_for_unshard = _outside_inference_mode(group.wait_for_unshard)


def _outside_inference_mode(wait: Callable[[], None]) -> Callable[[], None]:
    """Make the first call create gathered parameters with which later calls can train, in inference mode too."""

    def wait_for_unshard() -> None:
        if not torch.is_inference_mode_enabled():
            return wait()
        with torch.inference_mode(False), torch.no_grad():
            return wait()

    return wait_for_unshard
