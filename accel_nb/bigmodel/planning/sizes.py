"""Sizes of a model's parts, and the memory that is available for them."""

from __future__ import annotations

import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch import Tensor, nn

from accel_nb.config.byte_sizes import read_bytes
from accel_nb.errors import ConfigError
from accel_nb.runtime.devices.registry import default_type, device_type, is_meta

Device = int | str | torch.device
"""A place for weights: the number of an accelerator, a torch device, ``cpu`` or ``disk``."""

_ACCELERATOR_SHARE = 0.9
"""Usable share of a device's free memory; libraries allocate from the rest on first use."""


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """One tensor of a model with all its names; ``nbytes`` is its size after loading."""

    names: tuple[str, ...]
    nbytes: int
    is_buffer: bool

    @property
    def name(self) -> str:
        """The first name."""
        return self.names[0]


def parse_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """Return the dtype for ``torch.float16``, ``"float16"`` or ``"torch.float16"``; raises `ConfigError`."""
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise ConfigError(f"dtype {dtype!r} is not a dtype of torch; give one such as torch.bfloat16")
    return found


def list_tensors(
    model: nn.Module,
    dtype: torch.dtype | str | None = None,
    special_dtypes: Mapping[str, torch.dtype | str] | None = None,
) -> list[ModelTensor]:
    """Return parameters and buffers in the model's order, tied ones once; ``dtype`` applies to floating-point ones."""
    wanted = None if dtype is None else parse_dtype(dtype)
    special = {name: parse_dtype(own) for name, own in (special_dtypes or {}).items()}
    groups: dict[int, tuple[Tensor, list[str], bool]] = {}
    for is_buffer, named in (
        (False, model.named_parameters(remove_duplicate=False)),
        (True, model.named_buffers(remove_duplicate=False)),
    ):
        for name, tensor in named:
            groups.setdefault(id(tensor), (tensor, [], is_buffer))[1].append(name)
    held: list[ModelTensor] = []
    for tensor, names, is_buffer in groups.values():
        own = next((special[name] for name in names if name in special), None)
        if own is None and wanted is not None and tensor.is_floating_point():
            own = wanted
        held.append(ModelTensor(tuple(names), tensor.numel() * (own or tensor.dtype).itemsize, is_buffer))
    return held


def compute_module_sizes(
    model: nn.Module,
    dtype: torch.dtype | str | None = None,
    special_dtypes: Mapping[str, torch.dtype | str] | None = None,
    buffers_only: bool = False,
) -> dict[str, int]:
    """Return the bytes of the model (``""``), its modules and its tensors; a tied tensor counts at its first name."""
    sizes: dict[str, int] = {name: 0 for name, _ in model.named_modules(remove_duplicate=False)}
    for held in list_tensors(model, dtype, special_dtypes):
        if buffers_only and not held.is_buffer:
            continue
        for name in list_ancestors(held.name):
            sizes[name] = sizes.get(name, 0) + held.nbytes
    return sizes


def list_ancestors(name: str) -> list[str]:
    """Return a name and the names of its ancestors, the model first: "", "a", "a.b"."""
    parts = name.split(".") if name else []
    return ["", *(".".join(parts[:count]) for count in range(1, len(parts) + 1))]


def matches_name(name: str, pattern: str) -> bool:
    """Return whether a module or tensor has a name, or is in a module of that name.

    A pattern without dots matches at any depth: ``head`` matches ``decoder.head.weight``.
    """
    return pattern in list_ancestors(name)[1:] or pattern in name.split(".")


def find_tied_parameters(model: nn.Module) -> list[list[str]]:
    """Return the names of tied tensors, in groups of two or more."""
    return [list(held.names) for held in list_tensors(model) if len(held.names) > 1]


def find_blocks(model: nn.Module) -> list[str]:
    """Return the class names of repeated blocks: modules with children, of which a module list has two or more."""
    found: dict[str, None] = {}
    for module in model.modules():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            children = [child for child in module if child is not None]  # slots may be empty
            classes = [type(child).__name__ for child in children if next(child.children(), None) is not None]
            found.update(dict.fromkeys(name for name in classes if classes.count(name) > 1))
    return list(found)


def get_max_memory(max_memory: Mapping[Device, int | str] | None = None) -> dict[Device, int]:
    """Return the bytes that weights may take on each device: as given, else the memory that is free now.

    Accelerators come first, then ``cpu``. Memory of an integrated accelerator is subtracted from the CPU's. Raises
    `ConfigError` with all problems.
    """
    if max_memory is not None:
        return _parse_limits(max_memory)
    found: dict[Device, int] = {}
    host = available_host_memory()
    kind = default_type()
    for index in range(0 if kind.is_host else kind.count()):
        device = torch.device(kind.name, index)
        found[index] = int(kind.memory(device).free * _ACCELERATOR_SHARE)
        if kind.shares_host_memory(device):
            host = max(0, host - found[index])
    return {**found, "cpu": host}


def available_host_memory() -> int:
    """Return the bytes that this process may still allocate, by the machine, its control groups and its rlimits."""
    free = [available_memory()]
    process = psutil.Process().memory_info()
    for kind, used in ((resource.RLIMIT_AS, process.vms), (resource.RLIMIT_DATA, getattr(process, "data", 0))):
        limit, _ = resource.getrlimit(kind)
        if limit != resource.RLIM_INFINITY:
            free.append(limit - used)
    return max(0, min(free))


def available_memory() -> int:
    """Return the bytes available to this process, page cache included, by the machine and its control groups."""
    free = [psutil.virtual_memory().available, *_free_in_cgroups(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))]
    return max(0, min(free))


def _free_in_cgroups(root: Path, table: Path) -> list[int]:
    """Return the free bytes in each control group of this process (versions 1 and 2)."""
    try:
        lines = [line.split(":", 2) for line in table.read_text().splitlines()]
    except OSError:
        return []
    free: list[int] = []
    for _, controllers, path in (line for line in lines if len(line) == 3):
        if controllers not in ("", "memory"):
            continue
        base = root / controllers
        limit, usage = (
            ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
        )
        inside = base / path.lstrip("/")
        for folder in [inside, *inside.parents]:
            if folder == root.parent or not folder.is_relative_to(base):
                break
            free_here = _free_in_cgroup(folder / limit, folder / usage, folder / "memory.stat")
            if free_here is not None:
                free.append(free_here)
    return free


def _free_in_cgroup(limit: Path, usage: Path, stat: Path) -> int | None:
    """Return a control group's limit minus its usage without reclaimable page cache; None if unlimited."""
    try:
        allowed = limit.read_text().strip()
        if not allowed.isdigit():
            return None
        used = int(usage.read_text())
        cached = [int(line.split()[1]) for line in stat.read_text().splitlines() if line.startswith("inactive_file ")]
    except OSError:
        return None
    return int(allowed) - used + sum(cached)


def _parse_limits(max_memory: Mapping[Device, int | str]) -> dict[Device, int]:
    problems: list[str] = []
    if not isinstance(max_memory, Mapping) or not max_memory:
        raise ConfigError(f'max_memory is {max_memory!r}; write devices and bytes, as {{0: "10GB", "cpu": "30GB"}}')
    found: dict[Device, int] = {}
    for device, size in max_memory.items():
        problems += device_problems(device, "max_memory")
        try:
            # Plans compare devices with the names of places, as in `device == "cpu"`.
            found[str(device) if isinstance(device, torch.device) else device] = read_bytes(
                size, f"max_memory[{device!r}]"
            )
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    order = {"cpu": 1, "disk": 2}
    return dict(sorted(found.items(), key=lambda item: order.get(str(item[0]), 0)))


def device_problems(device: object, where: str, *, must_exist: bool = False) -> Sequence[str]:
    """Return the problems with a device name: one line or none."""
    allowed = "allowed are accelerator numbers from 0, names like 'cuda:0', 'cpu' and 'disk'"
    if isinstance(device, bool) or not isinstance(device, int | str | torch.device) or device == "":
        return [f"{where} names the device {device!r}; {allowed}"]
    if device == "disk":
        return []
    if isinstance(device, int) and device < 0:
        return [f"{where} names the device {device!r}; {allowed}"]
    if isinstance(device, int):
        made = to_torch_device(device)
    else:
        try:
            made = torch.device(device)
        except RuntimeError:
            return [f"{where} names the device {device!r}; {allowed}"]
    if not must_exist or device_type(made).is_host or is_meta(made):
        return []
    count = device_type(made).count()
    if (made.index or 0) >= count:
        return [f"{where} names the device {device!r}, and this machine has {count} of type {made.type}"]
    return []


def to_torch_device(device: Device) -> torch.device:
    """Return the torch device of a place other than ``disk``; a number is an accelerator's, CUDA's if there is none."""
    if isinstance(device, int):
        kind = default_type()
        return torch.device("cuda" if kind.is_host else kind.name, device)
    return torch.device(device)
