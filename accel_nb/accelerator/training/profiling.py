"""Profiling of a block of code on every rank, with a Chrome trace for each rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from accel_nb.accelerator.options.plugins import ProfileKwargs
from accel_nb.errors import MisuseError

Profiler = torch.profiler.profile
_SCHEDULE = ("skip_first", "wait", "warmup", "active", "repeat")


@contextmanager
def profiled(settings: ProfileKwargs, rank: int) -> Iterator[Profiler]:
    """Profile the block; write ``trace_rank<R>.json`` to the folder, or one file for each cycle of the schedule."""
    target = None if settings.output_trace_dir is None else _checked_folder(settings.output_trace_dir)
    is_repeated = settings.schedule_option is not None

    def write(profiler: Profiler) -> None:
        if settings.on_trace_ready is not None:
            settings.on_trace_ready(profiler)
        if target is not None:
            step = f"_step{profiler.step_num}" if is_repeated else ""
            profiler.export_chrome_trace(str(target / f"trace_rank{rank}{step}.json"))

    with torch_profiler(settings, write) as profiler:
        yield profiler


def torch_profiler(settings: ProfileKwargs, on_trace_ready: Callable[[Any], None] | None) -> Profiler:
    """Return torch's profiler with the options in ``settings``; it passes itself to ``on_trace_ready``."""
    return torch.profiler.profile(
        activities=None if settings.activities is None else [_activity(name) for name in settings.activities],
        schedule=_schedule(settings.schedule_option),
        on_trace_ready=on_trace_ready,
        record_shapes=settings.record_shapes,
        profile_memory=settings.profile_memory,
        with_stack=settings.with_stack,
        with_flops=settings.with_flops,
        with_modules=settings.with_modules,
    )


def _checked_folder(folder: str | os.PathLike[str]) -> Path:
    path = Path(folder).expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MisuseError(f"traces cannot be written to {str(path)!r}: {error}; give another folder") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise MisuseError(f"traces cannot be written to {str(path)!r}: the folder is read-only; give another")
    return path


def _activity(name: str) -> ProfilerActivity:
    known = {kind.name.lower(): kind for kind in torch.profiler.supported_activities()}
    if name.lower() not in known:
        raise MisuseError(f"the profiler has no activity {name!r}; it has {', '.join(sorted(known))}")
    return known[name.lower()]


def _schedule(schedule: Mapping[str, int] | Callable[[int], Any] | None) -> Callable[[int], Any] | None:
    if not isinstance(schedule, Mapping):
        return schedule
    unknown = [name for name in schedule if name not in _SCHEDULE]
    if unknown:
        raise MisuseError(f"a profiler's schedule has no {', '.join(unknown)}; it has {', '.join(_SCHEDULE)}")
    return torch.profiler.schedule(**{"wait": 0, "warmup": 0, "active": 1, **schedule})
