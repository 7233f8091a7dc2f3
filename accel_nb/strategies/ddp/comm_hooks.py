"""PyTorch's hooks that compress gradients between ranks, chosen by option.

All of them average a bucket as it is sent, so that a bucket that is never full is left as it was on each rank: just as
with the hook that DDP gets without compression. What DDP does not see is averaged without compression.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from accel_nb.runtime.devices.registry import device_type


class HookOptions(Protocol):
    """What is read of the configuration."""

    @property
    def comm_hook(self) -> str:
        """``fp16``, ``bf16`` or ``power_sgd``."""
        ...

    @property
    def comm_wrapper(self) -> str:
        """``fp16`` or ``bf16``: what the hook sends is cast to it; or ``no``."""
        ...

    @property
    def power_sgd_rank(self) -> int:
        """Rank of the approximation."""
        ...

    @property
    def power_sgd_start(self) -> int:
        """First compressed step."""
        ...

    @property
    def power_sgd_min_compression(self) -> float:
        """Least factor by which a tensor must get smaller."""
        ...

    @property
    def power_sgd_error_feedback(self) -> bool:
        """Carry over what was lost."""
        ...

    @property
    def power_sgd_warm_start(self) -> bool:
        """Start from the matrices of the step before."""
        ...

    @property
    def power_sgd_seed(self) -> int:
        """Seed of the first matrices."""
        ...


_HOOKS: dict[str, Any] = {
    "fp16": default_hooks.fp16_compress_hook,
    "bf16": default_hooks.bf16_compress_hook,
    "power_sgd": powerSGD_hook.powerSGD_hook,
}
_WRAPPERS: dict[str, Any] = {
    "fp16": default_hooks.fp16_compress_wrapper,
    "bf16": default_hooks.bf16_compress_wrapper,
}


def register_hook(ddp: DistributedDataParallel, options: HookOptions) -> None:
    """Give a new DDP object the hook of the options, with a state of its own; every rank must call."""
    hook = _HOOKS[options.comm_hook]
    state: Any = dist.group.WORLD
    if options.comm_hook == "power_sgd":
        state = powerSGD_hook.PowerSGDState(
            process_group=None,
            matrix_approximation_rank=options.power_sgd_rank,
            start_powerSGD_iter=options.power_sgd_start,
            min_compression_rate=cast(int, options.power_sgd_min_compression),  # it only multiplies by it
            use_error_feedback=options.power_sgd_error_feedback,
            warm_start=options.power_sgd_warm_start,
            random_seed=options.power_sgd_seed,
        )
    if options.comm_wrapper != "no":
        hook = _WRAPPERS[options.comm_wrapper](hook)
    ddp.register_comm_hook(state, _for_gloo(hook) if device_type(ddp.device_type).is_host else hook)


def _for_gloo(hook: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return the hook so that it works over gloo.

    It has another name: by its own DDP refuses bfloat16 without NCCL, which gloo sums as well. And it waits: PowerSGD
    sends a second message when the first has come, which gloo does from a thread of its own, so that messages of
    several buckets would not be in the same order on every rank.
    """

    def compress(state, bucket):  # without annotations: DDP compares them, and these would be text
        future = hook(state, bucket)
        future.wait()
        return future

    return compress
