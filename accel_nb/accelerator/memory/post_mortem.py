"""Report of a rank that has run out of memory: which objects hold how many bytes."""

from __future__ import annotations

import ast
import linecache
import re
import sys
import traceback
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from accel_nb.accelerator.core import Accelerator
from accel_nb.accelerator.process.memory_release import free_cached_memory, is_out_of_memory
from accel_nb.bigmodel.host_memory import trim_heap
from accel_nb.bigmodel.planning.sizes import available_host_memory
from accel_nb.runtime.devices.registry import device_type
from accel_nb.runtime.leaf_tensors import is_leaf
from accel_nb.runtime.process.user_code import is_user_module
from accel_nb.telemetry.memory_attribution import MemoryAttribution
from accel_nb.telemetry.out_of_memory import MemoryHolder, OutOfMemoryReport

_REQUESTED = re.compile(r"(?i)(?:tried to allocate|unable to allocate) ([\d.]+) ?(bytes|[KMGT]i?B)")
_UNITS = {"b": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_MAX_HOLDERS = 5


def report_out_of_memory(
    error: BaseException,
    accelerators: Sequence[Accelerator],
    namespace: Mapping[str, Any],
    *,
    device: torch.device | str,
    source: str,
) -> OutOfMemoryReport | None:
    """Return the report of an out-of-memory error; None for another error.

    Call it while the error's frames still reference their objects, before `release_error_memory` frees these.
    """
    if not is_out_of_memory(error):
        return None
    device = torch.device(device)
    entries = list(_entries(error))
    frames = [entry.tb_frame for entry in entries]
    attribution, models = attribute_memory(accelerators, namespace, device=device, source=source)
    for frame in frames:
        if frame.f_locals is not namespace:
            attribution.add_variables(
                {f"{name} in {frame.f_code.co_name}": value for name, value in frame.f_locals.items()}
            )
    attribution.add_other_tensors()
    device_kind = device_type(device)
    use = device_kind.memory(device)
    free = available_host_memory() if device_kind.is_host else use.free
    counted = attribution.bytes_by_kind.total()
    return OutOfMemoryReport(
        device=device_kind.name if device_kind.is_host else str(device),
        requested=requested_bytes(str(error)),
        free=free,
        bytes_by_kind=dict(attribution.bytes_by_kind),
        unattributed=max(0, use.allocated - counted),
        cached=max(0, use.reserved - use.allocated),
        usable=free + (counted if device_kind.is_host else use.reserved),
        line=_line(entries),
        module=_module(frames, models),
        holders=tuple(MemoryHolder(name, size) for name, size in largest_holders(attribution, _MAX_HOLDERS)),
    )


def attribute_memory(
    accelerators: Sequence[Accelerator], namespace: Mapping[str, Any], *, device: torch.device, source: str
) -> tuple[MemoryAttribution, list[nn.Module]]:
    """Count the bytes that models, optimizers and variables hold on a device; return them and the models."""
    objects = [*(item for known in accelerators for item in known.prepared_objects), *namespace.values()]
    models = [item for item in objects if isinstance(item, nn.Module)]
    attribution = MemoryAttribution(device)
    attribution.add_trained(models, [item for item in objects if isinstance(item, Optimizer)])
    lines = _bound_at(source)
    names = {name: value for name, value in dict(namespace).items() if not name.startswith("_")}
    attribution.add_variables(
        {f"{name} (line {lines[name]})" if name in lines else name: names[name] for name in names}
    )
    return attribution, models


def largest_holders(attribution: MemoryAttribution, number: int) -> list[tuple[str, int]]:
    """Return the names of the largest holders and their bytes, the largest first."""
    rows = [(f"`{name}`", size) for name, size in attribution.bytes_by_variable.items()]
    rows += [
        (f"weights, gradients and optimizer state of {module}", size)
        for module, size in attribution.bytes_by_module.items()
    ]
    rows += [
        (f"activations saved for the backward pass in or after {module}", size)
        for module, size in attribution.activation_bytes_by_module.items()
    ]
    return sorted((row for row in rows if row[1]), key=lambda row: -row[1])[:number]


def release_error_memory(error: BaseException, namespace: dict[str, Any], bound: Sequence[str]) -> None:
    """Free the objects that the frames of a reported error reference, so that the next cell can use their memory.

    ``bound`` are names that the cell binds. Tensors in these names are detached from their graphs: a ``loss`` would
    keep all activations until the next forward pass has computed another loss, for which there would be no memory.
    """
    current: BaseException | None = error
    while current is not None:
        traceback.clear_frames(current.__traceback__)
        for frame in [entry.tb_frame for entry in _entries(current)]:
            _ = frame.f_locals  # updates the copy of the variables that an earlier read of f_locals has made
        current = current.__cause__ or current.__context__
    for name in bound:
        value = namespace.get(name)
        if isinstance(value, Tensor) and not is_leaf(value):
            namespace[name] = value.detach()
    for name in ("last_exc", "last_type", "last_value", "last_traceback"):
        if hasattr(sys, name):
            delattr(sys, name)
    free_cached_memory()
    trim_heap()


def requested_bytes(text: str) -> int | None:
    """Return the number of requested bytes in the text of an allocator's error; None if there is none."""
    found = _REQUESTED.search(text)
    return None if found is None else int(float(found[1]) * _UNITS[found[2][0].lower()])


def _entries(error: BaseException) -> Iterator[types.TracebackType]:
    """Yield the entries of an error's traceback, the outermost first."""
    entry = error.__traceback__
    while entry is not None:
        yield entry
        entry = entry.tb_next


def _line(entries: Sequence[types.TracebackType]) -> str:
    """Return the user's code line of the innermost frame that has one, with its number and function, as text."""
    own = [entry for entry in entries if is_user_module(entry.tb_frame.f_globals.get("__name__"))]
    if not own:
        return ""
    # The line that raised: a frame has continued to the end of its `with` and `finally` blocks since.
    code, number = own[-1].tb_frame.f_code, own[-1].tb_lineno
    where = "" if code.co_name == "<module>" else f" of {code.co_name}"
    return f"line {number}{where}: {linecache.getline(code.co_filename, number).strip()[:120]}"


def _module(frames: Sequence[types.FrameType], models: Sequence[nn.Module]) -> str:
    """Return the module whose forward was running, by its path in the model."""
    paths = {id(module): path for model in models for path, module in model.named_modules()}
    for frame in reversed(frames):
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and paths.get(id(module)):
            return f"{paths[id(module)]} ({type(module).__name__})"
    return ""


def _bound_at(source: str) -> dict[str, int]:
    """Return for each name the last line of a cell that binds it, or that adds an item to its value."""
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except SyntaxError:
        return {}
    found: dict[str, int] = {}
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found[node.id] = max(found.get(node.id, 0), node.lineno)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            holder = node.func.value
            if isinstance(holder, ast.Name) and node.func.attr in ("append", "extend", "add", "insert", "update"):
                found[holder.id] = max(found.get(holder.id, 0), node.lineno)
    return found
