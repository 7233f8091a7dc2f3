"""The total norm of gradients of which ranks hold shards, and clipping to it."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from accel_nb.runtime.distributed import sharded
from accel_nb.runtime.distributed.communicator import Communicator
from accel_nb.runtime.world import World
from accel_nb.strategies.base import multiply_tensors


@torch.no_grad()
def clip_total_norm(
    parameters: Iterable[Tensor],
    max_norm: float,
    norm_type: float,
    world: World,
    comm: Communicator,
    *,
    num_stages: int,
    is_staged: Callable[[Tensor], bool],
) -> Tensor:
    """Clip gradients to ``max_norm`` and return their total norm before clipping; all-reduces one number.

    A parameter for which ``is_staged`` returns True is on the ranks of one of ``num_stages`` pipeline stages only.
    """
    device = torch.device(world.device)
    dtype: torch.dtype | None = None
    whole: list[Tensor] = []
    # By the number of ranks that hold the same shard: whatever the mesh is, one message carries the whole norm.
    shards: dict[int, list[Tensor]] = {}
    for value in parameters:
        gradient = value.grad
        if gradient is None:
            continue
        real = sharded.local_shard(gradient).real.dtype
        # Equal on all ranks, also on those without an element of any shard.
        dtype = real if dtype is None else torch.promote_types(dtype, real)
        if not sharded.is_sharded(gradient):
            whole.append(gradient)
            continue
        num_holders = world.size // num_stages if is_staged(value) else world.size
        shards.setdefault(sharded.num_copies(gradient, num_holders), []).append(sharded.local_shard(gradient))
    norms = {
        copies: _norm([shard for shard in own if shard.numel()], norm_type, device, dtype)
        for copies, own in shards.items()
    } or {1: _norm([], norm_type, device, dtype)}
    replicated_norm = _norm(whole, norm_type, device, dtype)
    if math.isinf(norm_type):
        sharded_norm = functools.reduce(torch.maximum, norms.values())
        total = torch.maximum(comm.all_reduce(sharded_norm, "max"), replicated_norm)
    else:
        # The sum over ranks includes a shard once for each of its copies, so it is divided by their number. `most` is
        # equal on all ranks: those of other stages may hold shards with other numbers of copies.
        most = world.size if num_stages > 1 else max(norms)
        powers = [norm**norm_type * (most / copies) for copies, norm in norms.items()]
        sharded_sum = comm.all_reduce(functools.reduce(torch.add, powers)) / most
        total = (sharded_sum + replicated_norm**norm_type) ** (1.0 / norm_type)
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    multiply_tensors((*itertools.chain(*shards.values()), *whole), scale)
    return total


def _norm(gradients: list[Tensor], norm_type: float, device: torch.device, dtype: torch.dtype | None) -> Tensor:
    if not gradients:
        return torch.zeros((), dtype=dtype or torch.float32, device=device)
    return torch.nn.utils.get_total_norm(gradients, norm_type).to(device, dtype)
