"""The arguments of `fully_shard` for the units of a model: mesh, precision, and resharding after the forward pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from accel_nb.config.sections import FsdpOptions
from accel_nb.precision.policy import PrecisionPolicy
from accel_nb.runtime.devices.registry import device_type
from accel_nb.runtime.mesh import DATA_DIMENSIONS, Mesh

_HALF = (torch.bfloat16, torch.float16)


def unit_settings(
    model: nn.Module,
    options: FsdpOptions,
    policy: PrecisionPolicy,
    *,
    parameter_mesh: Mesh,
    mesh: Any,
    device: torch.device,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of `fully_shard` for a model's units, and those for the model itself.

    ``parameter_mesh`` is the arrangement of the ranks that hold parameters, ``mesh`` the device mesh of its copies and
    shards.
    """
    compute = None if options.autocast else policy.compute
    is_half = compute is not None or any(value.dtype in _HALF for value in model.parameters())
    reduce = torch.float32 if is_half and options.reduce_dtype == "fp32" else None
    gathers_again = options.reshard_after_forward and parameter_mesh.dp_shard > 1 and parameter_mesh.pp == 1
    settings: dict[str, Any] = {
        "mesh": mesh,
        # With a single shard there is nothing to gather again; a stage gathers once for all micro-batches.
        "reshard_after_forward": None if gathers_again else False,
        "mp_policy": MixedPrecisionPolicy(compute, reduce),
    }
    if options.cpu_offload:
        settings["offload_policy"] = CPUOffloadPolicy(pin_memory=device_type(device).pins_memory)
    output = policy.output if compute is not None else None
    return settings, {**settings, "mp_policy": MixedPrecisionPolicy(compute, reduce, output)}


def expert_settings(settings: dict[str, Any], parameter_mesh: Mesh, expert_mesh: Any) -> dict[str, Any]:
    """Return the arguments of `fully_shard` for experts, which are on other ranks, and whose inputs are not cast.

    ``settings`` are the settings of the model's units, and ``expert_mesh`` is `MeshGroups.expert_mesh`.
    """
    copies, shard, _ = parameter_mesh.expert_shape
    return {
        **settings,
        "mesh": expert_mesh[DATA_DIMENSIONS if copies > 1 else DATA_DIMENSIONS[1:]],
        "reshard_after_forward": settings["reshard_after_forward"] if shard > 1 else False,
        "mp_policy": replace(settings["mp_policy"], cast_forward_inputs=False),
    }
