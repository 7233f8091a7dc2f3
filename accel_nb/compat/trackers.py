"""accelerate's registry of trackers by name; ``log_with`` accepts registered names."""

from __future__ import annotations

import importlib
import importlib.util
import os
import warnings
from typing import Any

from accel_nb.telemetry.trackers import GeneralTracker
from accel_nb.telemetry.trackers.selection import BUILT_IN

LOGGER_TYPE_TO_CLASS: dict[str, type[GeneralTracker]] = {
    name: getattr(importlib.import_module(f"accel_nb.telemetry.trackers.{name}"), kind)
    for name, (kind, _) in BUILT_IN.items()
    if name != "jsonl"
}
"""The classes of trackers by name. Code written for accelerate changes this dictionary to add its own."""


def get_available_trackers() -> list[str]:
    """Return the names of trackers whose packages are installed, and of registered trackers."""
    return [
        name for name in LOGGER_TYPE_TO_CLASS if name not in BUILT_IN or importlib.util.find_spec(BUILT_IN[name][1])
    ]


def register_tracker_class(tracker_class: type[GeneralTracker]) -> type[GeneralTracker]:
    """Add a class of trackers under its ``name``; raises ValueError for a class that is not complete."""
    if not isinstance(tracker_class, type) or not issubclass(tracker_class, GeneralTracker):
        raise ValueError(f"{tracker_class!r} is not a subclass of GeneralTracker")
    lacking = [
        name
        for name, kind in (("name", str), ("requires_logging_directory", bool))
        if not isinstance(getattr(tracker_class, name, None), kind)
        or not any(name in vars(base) for base in tracker_class.__mro__ if base is not GeneralTracker)
    ]
    if lacking:
        raise ValueError(f"{tracker_class.__name__} has no class attribute {' and '.join(lacking)}")
    name = str(tracker_class.name)
    if name in LOGGER_TYPE_TO_CLASS:
        warnings.warn(f"the tracker {name!r} was registered before and is replaced by the new class", stacklevel=2)
    LOGGER_TYPE_TO_CLASS[name] = tracker_class
    return tracker_class


def filter_trackers(log_with: Any, logging_dir: str | os.PathLike[str] | None = None) -> list[Any]:
    """Return the usable trackers of ``log_with``: names of installed ones, and tracker objects.

    Raises ValueError for an unknown name, and for one that needs a folder if there is none.
    """
    wanted = list(log_with) if isinstance(log_with, list | tuple) else [] if log_with is None else [log_with]
    known = get_available_trackers()
    chosen: list[Any] = []
    for item in wanted:
        if not isinstance(item, str):
            chosen.append(item)
        elif str(getattr(item, "value", item)) == "all":
            chosen += known
        else:
            chosen.append(str(getattr(item, "value", item)))
    for name in (item for item in chosen if isinstance(item, str)):
        kind = LOGGER_TYPE_TO_CLASS.get(name)
        if kind is None:
            raise ValueError(f"log_with: {name!r} is not a tracker; available are {', '.join(LOGGER_TYPE_TO_CLASS)}")
    require_folder(log_with, logging_dir)
    return list(dict.fromkeys(item for item in chosen if not isinstance(item, str) or item in known))


def require_folder(log_with: Any, logging_dir: str | os.PathLike[str] | None) -> None:
    """Raise ValueError if ``log_with`` names a tracker that writes files, and there is no folder."""
    wanted = log_with if isinstance(log_with, list | tuple) else [log_with]
    for name in (str(getattr(item, "value", item)) for item in wanted if isinstance(item, str)):
        kind = LOGGER_TYPE_TO_CLASS.get(name)
        if kind is not None and kind.requires_logging_directory and logging_dir is None:
            raise ValueError(f"log_with: {name!r} writes files, and needs a logging_dir: give project_dir")


def registered_names(log_with: Any) -> list[str]:
    """Return the names in ``log_with`` that were registered, without those of accel_nb itself."""
    wanted = log_with if isinstance(log_with, list | tuple) else [log_with]
    return [name for name in wanted if isinstance(name, str) and name in LOGGER_TYPE_TO_CLASS and name not in BUILT_IN]
