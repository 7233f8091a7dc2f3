"""Set-up of DeepSpeed in a process: its process group, its accelerator, and imports that would take long."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.comm import comm as their_comm
from deepspeed.runtime import compiler as their_compiler
from deepspeed.utils import groups as their_groups

from accel_nb.runtime.devices.registry import device_type

_group: Any = None


def use_default_group(device: torch.device) -> None:
    """Make DeepSpeed use the open default process group and this device; call again for another group."""
    global _group
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # DeepSpeed calls collectives that torch has deprecated: a warning in every step that no user can act on.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    if device_type(device).is_host:
        set_accelerator(CPU_Accelerator())
    if _group is dist.group.WORLD:
        return
    # Its collectives over shared memory would be compiled on first use, for a minute; gloo needs none. DeepSpeed
    # searches other operators to compile by running compilers: an empty result in its cache prevents that.
    ops: Any = deepspeed.ops
    vars(ops)["__compatible_ops__"] = vars(ops).get("__compatible_ops__", {})
    their_comm.cdb = None
    their_groups._release_process_group_references()
    # Otherwise it makes a second group of all ranks, with separate connections.
    their_groups._WORLD_GROUP = dist.group.WORLD
    _import_muon()
    deepspeed.init_distributed(dist_init_required=False, verbose=False)
    _group = dist.group.WORLD


def _import_muon() -> None:
    """Import DeepSpeed's Muon, for whose class every engine checks its optimizer, without loading a compiler.

    The module compiles kernels on import, which loads the compiler for seconds; here they are compiled on first call.
    """
    kept = their_compiler.compile
    their_compiler.compile = lambda: _compiled_late
    try:
        import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    finally:
        their_compiler.compile = kept


def _compiled_late(function: Callable[..., Any]) -> Callable[..., Any]:
    @cache
    def compiled() -> Callable[..., Any]:
        return torch.compile(function)

    return wraps(function)(lambda *args, **kwargs: compiled()(*args, **kwargs))
