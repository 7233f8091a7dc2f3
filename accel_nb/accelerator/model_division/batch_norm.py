"""Batch normalization over the rows of all ranks, on every type of device and for gradients of any order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from accel_nb.runtime.distributed.row_exchange import RowExchange


@contextmanager
def synchronized_batch_norm(exchange: RowExchange) -> Iterator[None]:
    """Make `torch.nn.functional.batch_norm` use the statistics of all ranks' rows inside of the block."""
    original = functional.batch_norm

    def batch_norm(
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        if not training:
            return original(input, running_mean, running_var, weight, bias, training, momentum, eps)
        return _normalize(exchange, input, running_mean, running_var, weight, bias, momentum, eps)

    try:
        functional.batch_norm = batch_norm
        yield
    finally:
        functional.batch_norm = original


def means_with_deviations(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by name in which each running mean is stacked with its standard deviations.

    The rounding error of a mean is proportional to the deviation. If the inputs of a layer are centered, as after a
    linear layer that follows another batch normalization, the mean consists of rounding errors alone.
    """
    joined = dict(values)
    for name, mean in values.items():
        if name.rpartition(".")[2] == "running_mean":
            variance = values.get(f"{name.removesuffix('running_mean')}running_var")
            if isinstance(variance, Tensor) and isinstance(mean, Tensor) and mean.shape == variance.shape:
                joined[name] = torch.stack([mean, variance.sqrt()])
    return joined


def _normalize(
    exchange: RowExchange,
    source: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: float,
    eps: float,
) -> Tensor:
    """Normalize by the mean and variance of all ranks' rows, combined as by Chan, Golub and LeVeque (1979)."""
    values = source.to(torch.promote_types(source.dtype, torch.float32))
    dims = [dim for dim in range(source.dim()) if dim != 1]
    shape = [1, -1, *[1] * (source.dim() - 2)]
    num_own = source.numel() // source.shape[1]
    own_mean = values.mean(dims)
    own_squares = (values - own_mean.view(shape)).square().sum(dims)
    parts = exchange.stack(torch.cat([own_mean.new_full((1,), num_own), own_mean, own_squares]))
    counts, means, squares = parts[:, :1].detach(), *parts[:, 1:].chunk(2, dim=1)
    total = counts.sum()
    mean = (counts * means).sum(0) / total
    variance = (squares.sum(0) + (counts * (means - mean).square()).sum(0)) / total
    # Changing `data` does not increase the version counter, as in torch's own kernel: an earlier call may have saved
    # the buffers for its backward pass.
    with torch.no_grad():
        if running_mean is not None:
            running_mean.data.mul_(1 - momentum).add_(mean.to(running_mean.dtype), alpha=momentum)
        if running_var is not None:
            unbiased = variance * (total / (total - 1))
            running_var.data.mul_(1 - momentum).add_(unbiased.to(running_var.dtype), alpha=momentum)
    scale = torch.rsqrt(variance + eps)
    if weight is not None:
        scale = scale * weight
    result = (values - mean.view(shape)) * scale.view(shape)
    if bias is not None:
        result = result + bias.view(shape)
    return result.to(source.dtype)
