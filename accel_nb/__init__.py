"""Write the notebook cell as for one device; run it on all of them; watch it live; keep the trained model."""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any


def _read_stub() -> dict[str, str]:
    """Return the defining module of each public name, as ``__init__.pyi`` lists them for type checkers."""
    with open(f"{__file__.rpartition('.')[0]}.pyi", encoding="utf-8") as stub:
        found = re.findall(r"(?m)^from (accel_nb\.\S+) import \w+ as (\w+)$", stub.read())
    return {name: module for module, name in found}


_MODULES = _read_stub()
__all__ = [*_MODULES, "__version__"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that ``import accel_nb`` does not import torch."""
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    if name == "compat":
        return import_module("accel_nb.compat")
    if name == "__version__":
        from importlib.metadata import version

        return version("accel_nb")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


def _jupyter_labextension_paths() -> list[dict[str, str]]:  # pyright: ignore[reportUnusedFunction]
    """Return the folders from which JupyterLab installs the built sidebar."""
    return [{"src": "labextension", "dest": "accel-nb"}]
