"""Samples of the memory use of a rank's device, at most five a second, since traversing parameters takes time."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from accel_nb.runtime.devices.registry import device_type
from accel_nb.runtime.distributed.sharded import local_shard
from accel_nb.runtime.tensors.nested import find_tensors
from accel_nb.runtime.tensors.stepped import stepped_parameters
from accel_nb.telemetry.events import EventSink, MemorySample

PERIOD_S = 0.2


class MemoryMeter:
    """Reports a `MemorySample` at most five times a second, and at the first step."""

    def __init__(self, rank: int, device: torch.device | str, sink: EventSink) -> None:
        self._rank = rank
        self._device = torch.device(device)
        self._sink = sink
        self.due = 0.0
        """The time of the next sample, as `time.perf_counter` returns it."""
        self._parameters = 0
        self._gradients = 0
        self._state = 0
        self._counted_key: tuple[int, ...] = ()
        self._baseline: int | None = None

    @property
    def bytes_by_kind(self) -> dict[str, int]:
        """Bytes of parameters (with buffers), gradients and optimizer state on this rank in the latest sample."""
        return {"parameters": self._parameters, "gradients": self._gradients, "optimizer": self._state}

    def sample(
        self,
        now: float,
        step: int,
        models: Iterable[nn.Module],
        optimizers: Iterable[Optimizer],
        hidden: tuple[int, int] = (0, 0),
    ) -> None:
        """Report a sample; call when ``now`` (`time.perf_counter`) has reached ``due``.

        Call between ``backward()`` and ``zero_grad()``, since gradients exist only then. ``hidden`` are the bytes of
        gradients and of optimizer state that cannot be found in models and optimizers.
        """
        self.due = now + PERIOD_S
        self._count(tuple(models), tuple(optimizers), hidden)
        use = device_type(self._device).memory(self._device)
        counted = self._parameters + self._gradients + self._state
        if self._baseline is None:
            # On the CPU the memory is the process's, most of which was allocated before the training: count its growth.
            self._baseline = max(0, use.allocated - counted) if use.is_of_process else 0
        self._sink.emit(
            MemorySample(
                rank=self._rank,
                step=step,
                time=time.time(),
                parameters=self._parameters,
                gradients=self._gradients,
                optimizer=self._state,
                other=max(0, use.allocated - counted - self._baseline),
                cached=max(0, use.reserved - use.allocated),
                free=use.free,
            )
        )

    def _count(self, models: tuple[nn.Module, ...], optimizers: tuple[Optimizer, ...], hidden: tuple[int, int]) -> None:
        """Count bytes again if models, optimizers, or state of the first step were added since the last count."""
        key = (
            *map(id, models),
            *map(id, optimizers),
            *[len(optimizer.state) for optimizer in optimizers],
            *hidden,
            self._gradients > 0,
        )
        if key == self._counted_key:
            return
        parameters = {id(value): value for model in models for value in model.parameters()}
        parameters.update({id(value): value for value in stepped_parameters(*optimizers)})
        buffers = [value for model in models for value in model.buffers()]
        self._parameters = storage_bytes([*parameters.values(), *buffers])
        self._gradients = storage_bytes([value.grad for value in parameters.values() if value.grad is not None])
        self._gradients += hidden[0]
        self._state = storage_bytes([tensor for optimizer in optimizers for tensor in find_tensors(optimizer.state)])
        self._state += hidden[1]
        self._counted_key = (*key[:-1], self._gradients > 0)


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the size of the tensors' storages on this rank in bytes; a shared storage is counted once."""
    storages: dict[Any, int] = {}
    for tensor in tensors:
        if not device_type(tensor.device).has_addresses:
            storages[id(tensor)] = tensor.nbytes
            continue
        local = local_shard(tensor)
        if (flatten := getattr(local, "__tensor_flatten__", None)) is not None:  # a subclass that consists of tensors
            storages[id(tensor)] = storage_bytes([getattr(local, name) for name in flatten()[0]])
            continue
        if tensor.layout is torch.sparse_coo:  # for example gradients of embeddings; consists of two tensors
            storages[id(tensor)] = tensor._indices().nbytes + tensor._values().nbytes
            continue
        if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
            storages[id(tensor)] = sum(x.nbytes for x in (tensor.crow_indices(), tensor.col_indices(), tensor.values()))
            continue
        if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
            storages[id(tensor)] = sum(x.nbytes for x in (tensor.ccol_indices(), tensor.row_indices(), tensor.values()))
            continue
        storage = local.untyped_storage()
        try:
            storages[storage.data_ptr(), tensor.device] = storage.nbytes()
        except RuntimeError:  # a subclass without memory of its own
            storages[id(tensor)] = tensor.nbytes
    return sum(storages.values())
