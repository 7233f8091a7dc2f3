"""The report of ``accel-nb doctor``: facts about this machine, and problems with their remedies. Imports no torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from tempfile import TemporaryFile
from typing import Literal

from accel_nb.runs.registry import default_folder
from accel_nb.runtime.process.hardware import (
    Machine,
    inspect_machine,
    missing_compiler,
    torch_cuda_version,
    why_no_xla,
    why_unusable,
)
from accel_nb.runtime.process.platforms import Platform, PlatformSignals, collect_signals, detect_platform, find_tpu
from accel_nb.runtime.process.requirements import unmet_requirements
from accel_nb.runtime.process.tested_versions import newer_than_tested, tested_versions
from accel_nb.runtime.torch_private import why_unchecked

GIB = 1024**3
SMALL_SHM = 1 * GIB
SMALL_DISK = 5 * GIB

Level = Literal["ok", "note", "warning"]
_MARKS: dict[Level, str] = {"ok": "  ok", "note": "note", "warning": "WARN"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    level: Level
    text: str

    def __str__(self) -> str:
        return f"[{_MARKS[self.level]}] {self.text}"


def diagnose(machine: Machine | None = None, signals: PlatformSignals | None = None) -> list[Finding]:
    """Return findings about platform, packages, devices, memory and disk, in the order of the report."""
    machine, signals = machine or inspect_machine(), signals or collect_signals()
    platform = detect_platform(signals)
    tpu = find_tpu(signals)
    return [
        Finding("ok", f"platform: {platform.title}, Python {sys.version.split()[0]}; panel: {platform.display_mode}"),
        *(Finding("note", advice) for advice in platform.advice),
        *_packages(),
        *inspect_devices(machine),
        *([] if tpu is None else [_tpu(tpu)]),
        *_compiler(),
        *_registry(),
        *_persistent_folder(platform, signals),
    ]


def inspect_devices(machine: Machine) -> list[Finding]:
    """Return findings about the processors, memory, devices and disk of any machine."""
    return [
        Finding("ok", f"{machine.num_cores} cores"),
        Finding("ok", f"memory: {machine.free_bytes / GIB:.1f} of {machine.total_bytes / GIB:.1f} GiB free"),
        *_gpus(machine),
        *_space(machine),
    ]


def _packages() -> Iterator[Finding]:
    yield from (Finding("warning", problem) for problem in unmet_requirements())
    for name in ("accel_nb", "torch", "torch_xla", "deepspeed"):
        try:
            yield Finding("ok", f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
        if name == "torch" and (unchecked := why_unchecked()) is not None:
            yield Finding("note", unchecked)
        if name == "torch_xla" and (why := why_no_xla()) is not None:
            yield Finding("warning", why)
    for newer in map(newer_than_tested, tested_versions()):
        if newer is not None:
            yield Finding("warning", newer)


def _tpu(name: str) -> Finding:
    why = why_no_xla()
    if why is not None:
        return Finding("warning", f"{name}: {why}; or use --cpus N")
    return Finding(
        "note", f"{name}: one worker drives all of its chips (strategy xla); it has not been tested on a TPU"
    )


def _gpus(machine: Machine) -> Iterator[Finding]:
    if not machine.gpus:
        yield Finding("note", "no GPU is visible: cells run on CPU workers (--cpus N)")
    for problem in machine.gpu_problems:
        yield Finding("warning", f"{problem}; see nvidia-smi")
    for gpu in machine.gpus:
        name = f"GPU {gpu.index}: {gpu.name}, {gpu.free_bytes / GIB:.1f} of {gpu.total_bytes / GIB:.1f} GiB free"
        yield Finding("ok", name)
        if (why := why_unusable(gpu, torch_cuda_version())) is not None:
            yield Finding("warning", why)
        if not gpu.has_real_bf16:
            yield Finding("warning", f"GPU {gpu.index} only emulates bf16: use --precision fp16 or auto")
        if gpu.free_bytes < gpu.total_bytes // 2:
            yield Finding("warning", f"GPU {gpu.index} is more than half full before you start: see nvidia-smi")


def _space(machine: Machine) -> Iterator[Finding]:
    shm = machine.shm_free_bytes
    if shm < SMALL_SHM:
        yield Finding(
            "note",
            f"/dev/shm has {shm / 2**20:.0f} MiB: accel_nb does not use it, but DataLoader workers do; "
            "use num_workers=0 or a larger --shm-size if they die with a bus error",
        )
    disk = machine.disk_free_bytes
    if disk is None:
        yield Finding("warning", "the current folder was deleted: change to another one by %cd")
        return
    level: Level = "warning" if disk < SMALL_DISK else "ok"
    yield Finding(level, f"{disk / GIB:.0f} GiB free on the current folder's disk")


def _compiler() -> Iterator[Finding]:
    if (compiler := missing_compiler()) is not None:
        yield Finding(
            "note",
            f"the C++ compiler {compiler} is not installed: --compile.backend inductor needs it, other runs do not",
        )


def _registry() -> Iterator[Finding]:
    """Report a folder where runs cannot be recorded. A file is created, since permissions do not restrict root."""
    folder = default_folder()
    existing = next(place for place in (folder, *folder.parents) if os.path.exists(place))  # `Path.exists` may raise
    try:
        with TemporaryFile(dir=existing):
            return
    except OSError as error:
        why = f"{existing} cannot be written to ({error.strerror})"
    yield Finding("warning", f"{why}: runs are not recorded; set XDG_STATE_HOME to another folder")


def _persistent_folder(platform: Platform, signals: PlatformSignals) -> Iterator[Finding]:
    """Report the folder whose files outlive the session, on platforms that delete all others."""
    folder = platform.kept_folder
    if folder is None:
        return
    if not signals.has_path(folder):
        remedy = f": {platform.keep_advice}" if platform.keep_advice else ""
        yield Finding("warning", f"{folder} does not exist, and all other files are deleted with the session{remedy}")
    elif platform.kept_bytes is None:
        yield Finding("ok", f"files in {folder} outlive the session: --checkpoint {folder}/NAME")
    else:
        used = sum(os.path.getsize(os.path.join(place, name)) for place, name in _files(folder))
        left = platform.kept_bytes - used
        space = f"{left / 1e9:.1f} of {platform.kept_bytes / 1e9:.0f} GB"
        text = f"{space} are left in {folder}, whose files outlive the session"
        is_little = left < SMALL_DISK
        remedy = "delete files, and keep few checkpoints with --checkpoint.total-limit 2" if is_little else ""
        yield Finding("warning" if is_little else "ok", f"{text}: {remedy or f'--checkpoint {folder}/NAME'}")


def _files(folder: str) -> Iterator[tuple[str, str]]:
    for place, _, names in os.walk(folder):
        yield from ((place, name) for name in names if not os.path.islink(os.path.join(place, name)))
