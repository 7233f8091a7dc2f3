"""The file of `accelerate config` as the options of a launch, and as its machines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from accel_nb.config import Layer
from accel_nb.config.accelerate_import import import_file

_MACHINE_FIELDS = ("num_machines", "machine_rank", "main_process_ip", "main_process_port", "rdzv_backend")


@dataclass(frozen=True, slots=True)
class ImportedFile:
    """A file of accelerate's: its options, the launcher's own flags that it sets, and what is not imported."""

    layer: Layer
    flags: Mapping[str, list[str]]
    notes: tuple[str, ...]


def read_accelerate_file(path: str) -> ImportedFile:
    """Return the contents of a file that accelerate wrote; raise ConfigError for an unreadable or other file."""
    document, report = import_file(path)
    flags = _machine_flags(document)
    notes = tuple(
        f"{name} in {path} is not used: {reason}"
        for name, reason in report.not_imported.items()
        if name not in _MACHINE_FIELDS
    )
    return ImportedFile(Layer("file", report.options, path), flags, notes)


def _machine_flags(document: Mapping[str, Any]) -> dict[str, list[str]]:
    count = document.get("num_machines")
    if count in (None, 0, 1):
        return {}
    flags = {"--nnodes": [str(count)], "--node-rank": [str(document.get("machine_rank") or 0)]}
    host, port = document.get("main_process_ip"), document.get("main_process_port")
    if host is not None and port is not None:
        flags["--rdzv-endpoint"] = [f"{host}:{port}"]
    if document.get("rdzv_backend") is not None:
        flags["--rdzv-backend"] = [str(document["rdzv_backend"])]
    return flags
