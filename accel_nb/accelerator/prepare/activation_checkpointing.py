"""Activation checkpointing of repeated blocks: activations are recomputed in the backward pass instead of stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from accel_nb.accelerator.prepare.compiling import current_forward
from accel_nb.runtime.tensors.instance_patching import replace_forward, restore_forward
from accel_nb.strategies.fsdp.wrap_policy import repeated_blocks


class ActivationCheckpointer:
    """Checkpoints the repeated blocks of models, in place, after a strategy has wrapped them."""

    def __init__(self, is_on: bool) -> None:
        self.is_on = is_on
        self._blocks: dict[int, list[nn.Module]] = {}

    def apply(self, model: nn.Module) -> None:
        """Checkpoint a model's repeated blocks, so that autograd stores only their inputs."""
        if not self.is_on or id(model) in self._blocks:
            return
        blocks: list[nn.Module] = []
        self._blocks[id(model)] = blocks
        for block in repeated_blocks(model).values():
            replace_forward(block, _wrap_block(block, current_forward(block)))
            blocks.append(block)

    def undo(self, model: nn.Module) -> None:
        """Restore the forwards of the blocks, before a strategy unwraps the model."""
        for block in self._blocks.pop(id(model), ()):
            restore_forward(block)

    def describe(self, model: nn.Module) -> str | None:
        """Return a short text about which parts of a model are checkpointed; None if checkpointing is off."""
        blocks = self._blocks.get(id(model))
        if blocks is None:
            return None
        kind = type(model).__name__
        if not blocks:
            return f"activation_checkpointing has no effect on {kind}, which has no repeated blocks"
        return f"{len(blocks)} blocks of {kind} recompute their activations"


def _wrap_block(block: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    def forward_or_checkpoint(*args: Any, **kwargs: Any) -> Any:
        if not block.training:
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return forward_or_checkpoint
