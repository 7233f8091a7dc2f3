"""Search for objects that are reachable from values, and for the user's code on the stack.

The search includes containers, closures, and the attributes of objects whose class the user has written.
"""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
import types
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from accel_nb.runtime.distributed import sharded
from accel_nb.runtime.generators import generator_values

_MAX_DEPTH = 3
_MAX_CONTAINER = 64
_MAX_TENSORS = 4096
_OWN = "accel_nb"


def find_training_objects(values: Iterable[Any]) -> Iterator[Any]:
    """Yield the models, optimizers, schedulers and loaders in ``values`` or reachable from them, each once."""
    return _search(values, lambda value: isinstance(value, nn.Module | Optimizer | LRScheduler | DataLoader))


def find_sharded_tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the sharded tensors in ``values`` or reachable from them but not in models and optimizers, each once."""
    kinds = nn.Module | Optimizer | LRScheduler | DataLoader
    found = _search(values, lambda value: isinstance(value, kinds) or sharded.is_sharded(value), _MAX_TENSORS)
    return (value for value in found if not isinstance(value, kinds))


def _search(values: Iterable[Any], is_found: Callable[[Any], bool], longest: int = _MAX_CONTAINER) -> Iterator[Any]:
    seen: set[int] = set()
    queue = [(value, 0) for value in values]
    for value, depth in queue:
        if id(value) in seen:
            continue
        seen.add(id(value))
        found = is_found(value)
        if found:
            yield value
        if (not found or isinstance(value, nn.Module)) and depth < _MAX_DEPTH:
            queue += [(part, depth + 1) for part in _parts(value, longest)]


def _parts(value: Any, longest: int) -> Iterable[Any]:
    if isinstance(value, list | tuple | set | dict):
        inside = value.values() if isinstance(value, dict) else value
        return inside if len(inside) <= longest else ()
    if isinstance(value, types.FunctionType):
        if not is_user_module(value.__module__):
            return ()
        return [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)] + [
            *(value.__defaults__ or ()),
            *(value.__kwdefaults__ or {}).values(),
        ]
    if isinstance(value, types.MethodType):
        return (value.__self__,)
    if isinstance(value, functools.partial):
        return (value.func, *value.args, *value.keywords.values())
    if isinstance(value, types.GeneratorType):
        return generator_values(value).values()
    if not isinstance(value, type) and is_user_module(type(value).__module__):
        # Without torch's own attributes of a module, whose names begin with an underscore and which hold submodules.
        is_module = isinstance(value, nn.Module)
        attributes = [
            part for name, part in getattr(value, "__dict__", {}).items() if not (is_module and name.startswith("_"))
        ]
        return attributes if len(attributes) <= longest else ()
    return ()


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def is_user_module(module: str | None) -> bool:
    """Whether a module is the user's: the notebook, or a file outside of the standard library and site-packages."""
    if module == "__main__":
        return True
    if module is None or module.partition(".")[0] == _OWN:
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is not None and not _is_library(file)


@functools.cache
def _is_library(file: str) -> bool:
    folders = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    path = os.path.realpath(file)
    return (
        "site-packages" in path
        or "dist-packages" in path
        or any(path.startswith(os.path.realpath(folder) + os.sep) for folder in folders)
    )


def is_called_by_user() -> bool:
    """Whether the nearest caller, other than torch and accel_nb, is code of the user and not of a library."""
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] not in (_OWN, "torch"):
            return is_user_module(module)
        frame = frame.f_back
    return False


def user_frame() -> types.FrameType | None:
    """Return the nearest calling frame whose code the user has written; None if there is none."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and not is_user_module(_module_name(frame)):
        frame = frame.f_back
    return frame


def _module_name(frame: types.FrameType) -> str:
    """Return the name of a frame's module, which for a module that Python runs as a program is not ``__main__``."""
    return getattr(frame.f_globals.get("__spec__"), "name", None) or frame.f_globals.get("__name__", "")


def cell_frames(namespace: dict[str, Any]) -> Iterator[types.FrameType]:
    """Yield the frames from the caller's up to the cell's own, without those of this package."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] != _OWN:
            yield frame
        if frame.f_globals is namespace and frame.f_code.co_name == "<module>":
            return
        frame = frame.f_back


def is_run_by_library(namespace: dict[str, Any], besides: Collection[str] = ()) -> bool:
    """Return whether an installed package, other than torch and ``besides``, is among the callers up to the cell."""
    modules = (frame.f_globals.get("__name__", "") for frame in cell_frames(namespace))
    return any(_is_installed(module) for module in modules if module.partition(".")[0] not in ("torch", *besides))


def _is_installed(module: str) -> bool:
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is not None and ("site-packages" in file or "dist-packages" in file)
