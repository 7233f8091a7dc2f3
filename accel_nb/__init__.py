"""Write the notebook cell as for one device; run it on all of them; watch it live; keep the trained model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel_nb.accelerator import Accelerator

    __version__: str

__all__ = ["Accelerator", "__version__", "load_ipython_extension", "unload_ipython_extension"]


def __getattr__(name: str) -> Any:
    """Import torch and packaging only when something that needs them is asked for."""
    if name == "Accelerator":
        from accel_nb.accelerator import Accelerator

        return Accelerator
    if name == "__version__":
        from importlib.metadata import version

        return version("accel_nb")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


def load_ipython_extension(shell: Any) -> None:
    """Register the magics; a clean process starts importing torch in the background. Returns in milliseconds."""
    from accel_nb.notebook.magics import load

    load(shell)


def unload_ipython_extension(shell: Any) -> None:
    """End the workers and take the magics away."""
    from accel_nb.notebook.magics import unload

    unload(shell)


def _jupyter_labextension_paths() -> list[dict[str, str]]:
    """Tell JupyterLab where the built sidebar lies."""
    return [{"src": "labextension", "dest": "accel-nb"}]
