"""Selection of trackers by ``log_with``.

Another package adds a tracker by an entry point in the group ``accel_nb.trackers``, whose name is the tracker's and
whose value is the class.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Mapping
from enum import Enum
from importlib.metadata import EntryPoint
from types import MappingProxyType
from typing import Any

from accel_nb.config.installed import installed_entry_points
from accel_nb.config.message_text import did_you_mean
from accel_nb.errors import ConfigError, MisuseError
from accel_nb.telemetry.trackers.base import GeneralTracker

BUILT_IN: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "jsonl": ("JsonlTracker", "json"),
        "tensorboard": ("TensorBoardTracker", "tensorboard"),
        "wandb": ("WandbTracker", "wandb"),
        "mlflow": ("MlflowTracker", "mlflow"),
        "comet_ml": ("CometTracker", "comet_ml"),
        "clearml": ("ClearmlTracker", "clearml"),
        "aim": ("AimTracker", "aim"),
        "swanlab": ("SwanlabTracker", "swanlab"),
        "trackio": ("TrackioTracker", "trackio"),
        "dvclive": ("DvcliveTracker", "dvclive"),
    }
)
"""The class by module name, and the package that it imports when it is started."""

TRACKER_GROUP = "accel_nb.trackers"
"""The group of entry points by which other packages add trackers."""


def parse_log_with(log_with: Any) -> tuple[str | GeneralTracker, ...]:
    """Return the names and trackers in ``log_with``; raises `ConfigError` for unknown names and missing packages.

    ``all`` stands for every installed tracker, including those of other packages.
    """
    if log_with is None:
        return ()
    wanted: list[Any] = list(log_with) if isinstance(log_with, list | tuple) else [log_with]  # pyright: ignore[reportUnknownArgumentType]
    chosen: list[str | GeneralTracker] = []
    problems: list[str] = []
    external = _external_trackers()
    for item in wanted:
        if _is_tracker(item):
            chosen.append(item)
            continue
        name = str(item.value if isinstance(item, Enum) else item).lower()
        if name == "all":
            chosen += [known for known, (_, package) in BUILT_IN.items() if _is_installed(package)]
            chosen += external
        elif name in external:
            chosen.append(name)
        elif name not in BUILT_IN:
            names = [*BUILT_IN, *external]
            problems.append(
                f"log_with: {name!a} is not a tracker{did_you_mean(name, names)}; there are {', '.join(names)}"
            )
        elif not _is_installed(BUILT_IN[name][1]):
            problems.append(f"log_with: {name} needs a package that is not installed: pip install {BUILT_IN[name][1]}")
        else:
            chosen.append(name)
    if problems:
        raise ConfigError(problems)
    # By identity: a tracker that is a dataclass has no hash.
    return tuple({item if isinstance(item, str) else id(item): item for item in chosen}.values())


def build_trackers(
    choice: tuple[str | GeneralTracker, ...],
    run: str,
    folder: str | os.PathLike[str] | None,
    options: Mapping[str, Mapping[str, Any]],
) -> list[GeneralTracker]:
    """Build the trackers of a choice, without opening a run; ``options`` are keyword arguments by tracker name.

    Raises `MisuseError` if a tracker needs a folder and there is none, if there are options for a tracker that is not
    chosen, and if a tracker of another package cannot be imported.
    """
    names = [item if isinstance(item, str) else item.name for item in choice]
    if unknown := [name for name in options if name not in names]:
        raise MisuseError(
            f"init_kwargs names {', '.join(unknown)}, but log_with has only {', '.join(names) or 'no tracker'}"
        )
    trackers: list[GeneralTracker] = []
    for item in choice:
        if not isinstance(item, str):
            trackers.append(item)
            continue
        kind = _tracker_class(item)
        # A class of another package need not be a subclass.
        arguments: dict[str, Any] = {getattr(kind, "name_argument", "run_name"): _file_name(run)}
        if kind.requires_logging_directory and folder is None:
            raise MisuseError(f"{item} writes files and has no folder; give Accelerator(project_dir=...)")
        if kind.requires_logging_directory or (
            folder is not None and getattr(kind, "accepts_logging_directory", False)
        ):
            # The thread of the trackers opens it later, when the current folder may be another.
            arguments["logging_dir"] = folder if "://" in os.fspath(folder or "") else os.path.abspath(folder or "")
        trackers.append(kind(**{**arguments, **options.get(item, {})}))
    return trackers


def _external_trackers() -> dict[str, EntryPoint]:
    """Return the trackers of other packages by name, except those with the name of a built-in tracker."""
    points = {point.name.lower(): point for point in installed_entry_points(TRACKER_GROUP)}
    return {name: point for name, point in points.items() if name not in BUILT_IN}


def _tracker_class(name: str) -> type[Any]:
    if name in BUILT_IN:
        return getattr(importlib.import_module(f"accel_nb.telemetry.trackers.{name}"), BUILT_IN[name][0])
    point = _external_trackers()[name]
    try:
        loaded: Any = point.load()
    except Exception as error:  # importing another package's module may raise any exception
        raise MisuseError(f"log_with: {name} ({point.value}) cannot be imported: {error!r}") from error
    if not isinstance(loaded, type) or getattr(loaded, "name", None) != name:
        raise MisuseError(f"log_with: {name} ({point.value}) must be a tracker class with name = {name!r}")
    return loaded


def _is_installed(package: str) -> bool:
    # Some packages create a folder of results under their own name, which imports as a namespace package.
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def _is_tracker(item: Any) -> bool:
    # Check attributes, because trackers written for Hugging Face Accelerate are not subclasses of GeneralTracker.
    return not isinstance(item, str | Enum) and callable(getattr(item, "log", None)) and hasattr(item, "name")


def _file_name(run: str) -> str:
    """Return a file name without path separators made from a run's name."""
    name = "".join(letter if letter.isalnum() or letter in "-_. " else "_" for letter in run).strip(". ")
    return name[:128] or "run"
