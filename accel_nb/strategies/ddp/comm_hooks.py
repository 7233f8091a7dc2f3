"""PyTorch's communication hooks, which compress gradients between ranks, chosen by option.

All of them average a bucket when it is sent, so a bucket that never fills keeps each rank's values, as with the hook
without compression. Gradients that DDP does not reduce are averaged without compression.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from accel_nb.config.sections import DdpOptions
from accel_nb.runtime.devices.registry import device_type
from accel_nb.runtime.distributed.communicator import Communicator
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
    """Register the hook that the options name, with a new state, on a new DDP object; every rank must call."""
    hook = _HOOKS[options.comm_hook]
    state: Any = dist.group.WORLD
    if options.comm_hook == "power_sgd":
        state = powerSGD_hook.PowerSGDState(
            process_group=None,
            matrix_approximation_rank=options.power_sgd_rank,
            start_powerSGD_iter=options.power_sgd_start,
            min_compression_rate=cast(int, options.power_sgd_min_compression),  # PowerSGDState only multiplies by it
            use_error_feedback=options.power_sgd_error_feedback,
            warm_start=options.power_sgd_warm_start,
            random_seed=options.power_sgd_seed,
        )
    if options.comm_wrapper != "no":
        hook = _WRAPPERS[options.comm_wrapper](hook)
    ddp.register_comm_hook(state, _gloo_hook(hook) if device_type(ddp.device_type).is_host else hook)


def average_buckets(ddp: DistributedDataParallel, comm: Communicator) -> None:
    """Register the hook that averages whole buckets, without compression; every rank must call."""
    if device_type(ddp.device_type).is_host:
        ddp.register_comm_hook(None, _small_bucket_hook(comm))
        return
    if not is_checked("ddp.builtin_hook"):
        ddp.register_comm_hook(dist.group.WORLD, default_hooks.allreduce_hook)
        return
    from torch._C._distributed_c10d import BuiltinCommHookType

    ddp._register_builtin_comm_hook(BuiltinCommHookType.ALLREDUCE)


def _small_bucket_hook(comm: Communicator) -> Callable[[Any, Any], Any]:
    """Return the hook for tensors on the host, which averages a small bucket by one exchange, and waits for it."""

    def average(state, bucket):  # without annotations: DDP compares them, and here they would be strings
        gradients = bucket.buffer()
        if not comm.sums_at_once(gradients):
            group: Any = dist.group.WORLD
            return default_hooks.allreduce_hook(group, bucket)
        future = torch.futures.Future()
        future.set_result(comm.all_reduce(gradients.div_(comm.world.size)))
        return future

    return average


def _gloo_hook(hook: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return a hook like ``hook`` that works over gloo.

    Its name differs, since DDP without NCCL refuses the bfloat16 hook by name, although gloo can sum bfloat16. It waits
    for the result: PowerSGD sends a second message after the first has arrived. Gloo would send it from another thread,
    and ranks would send the messages of several buckets in different orders.
    """

    def compress(state, bucket):  # without annotations: DDP compares them, and here they would be strings
        future = hook(state, bucket)
        future.wait()
        return future

    return compress
