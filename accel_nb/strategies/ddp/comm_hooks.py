"""PyTorch's hooks that compress gradients between ranks, chosen by option.

All of them average a bucket as it is sent, so that a bucket that is never full is left as it was on each rank: just as
with the hook that DDP gets without compression. What DDP does not see is averaged without compression.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from accel_nb.config.sections import DdpOptions
from accel_nb.runtime.torch_private import is_checked

_HOOKS: dict[str, Any] = {
    "fp16": default_hooks.fp16_compress_hook,
    "bf16": default_hooks.bf16_compress_hook,
    "power_sgd": powerSGD_hook.powerSGD_hook,
}
_WRAPPERS: dict[str, Any] = {
    "fp16": default_hooks.fp16_compress_wrapper,
    "bf16": default_hooks.bf16_compress_wrapper,
}


def register_hook(ddp: DistributedDataParallel, options: DdpOptions) -> None:
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
    ddp.register_comm_hook(state, _for_gloo(hook) if ddp.device_type == "cpu" else hook)


def average_buckets(ddp: DistributedDataParallel) -> None:
    """Register the hook that averages whole buckets, without compression; every rank must call."""
    if not is_checked("ddp.builtin_hook"):
        ddp.register_comm_hook(dist.group.WORLD, default_hooks.allreduce_hook)
        return
    from torch._C._distributed_c10d import BuiltinCommHookType

    ddp._register_builtin_comm_hook(BuiltinCommHookType.ALLREDUCE)


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
