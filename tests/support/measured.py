"""Measured memory, from the profiler's record of allocations on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from accel_nb.telemetry.memory import storage_bytes


def peak_bytes(run: Callable[[], Any]) -> int:
    """Run, and return the peak of allocated bytes above those at the start; scratch memory of kernels is included."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        run()
    assert record.profiler is not None
    events = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def held_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Return the bytes of this rank's parameters and buffers, gradients and optimizer state, by storage."""
    parameters = list(model.parameters())
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return {
        "parameters": storage_bytes(map(_local, [*parameters, *model.buffers()])),
        "gradients": storage_bytes([_local(value.grad) for value in parameters if value.grad is not None]),
        "optimizer": storage_bytes(map(_local, states)),
    }


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a sharded tensor, and any other tensor itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
