"""Search for objects that are reachable from values.

The search includes containers, closures, and the attributes of objects whose class the user has written.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from accel_nb.runtime.container_items import items_of
from accel_nb.runtime.distributed import sharded
from accel_nb.runtime.process.user_code import is_user_module
from accel_nb.runtime.python_generators import generator_values

_MAX_DEPTH = 3
_MAX_CONTAINER = 64
_MAX_TENSORS = 4096
_MAX_TENSOR_DEPTH = 8
"""Deep enough for a tensor in an optimizer's state dict in a checkpoint in a list in an object."""


def find_training_objects(values: Iterable[Any]) -> Iterator[Any]:
    """Yield the models, optimizers, schedulers and loaders in ``values`` or reachable from them, each once."""
    return _search(values, lambda value: isinstance(value, nn.Module | Optimizer | LRScheduler | DataLoader))


def find_sharded_tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the sharded tensors in ``values`` or reachable from them but not in models and optimizers, each once."""
    kinds = nn.Module | Optimizer | LRScheduler | DataLoader
    found = _search(
        values, lambda value: isinstance(value, kinds) or sharded.is_sharded(value), _MAX_TENSORS, _MAX_TENSOR_DEPTH
    )
    return (value for value in found if not isinstance(value, kinds))


def _search(
    values: Iterable[Any], is_found: Callable[[Any], bool], longest: int = _MAX_CONTAINER, deepest: int = _MAX_DEPTH
) -> Iterator[Any]:
    seen: set[int] = set()
    queue = [(value, 0) for value in values]
    for value, depth in queue:
        if id(value) in seen:
            continue
        seen.add(id(value))
        found = is_found(value)
        if found:
            yield value
        if (not found or isinstance(value, nn.Module)) and depth < deepest:
            queue += [(part, depth + 1) for part in _parts(value, longest)]


def _parts(value: Any, longest: int) -> Iterable[Any]:
    if isinstance(value, list | tuple | set | dict):
        return items_of(value, longest)
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
