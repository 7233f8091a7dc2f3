"""The attributes of data loaders that notebook and workers have in common, and whether worker processes have started.

A loader with ``persistent_workers`` draws a seed when it starts its worker processes, and never again. These processes
cannot be sent: `StartedWorkers` stands for them, and starts new ones in the receiving process without drawing a seed.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from accel_nb.pool.sync.objects.object_kinds import set_attributes

_ITERATOR = "_iterator"


@dataclass(frozen=True)
class StartedWorkers:
    """Stands in a loader for its persistent worker processes, which run in the sending process only."""

    def _reset(self, loader: Any) -> None:
        """Start worker processes here: torch calls this to begin an iteration, and then reads the attribute."""
        torch = sys.modules["torch"]
        own = loader.generator
        loader.__dict__["generator"] = torch.Generator().manual_seed(torch.initial_seed())
        try:
            loader.__dict__[_ITERATOR] = loader._get_iterator()
        finally:
            loader.__dict__["generator"] = own


def has_started_workers(loader: Any) -> bool:
    """Return whether a loader has started persistent workers, in this process or in the process that sent it."""
    return bool(loader.persistent_workers) and vars(loader).get(_ITERATOR) is not None


def loader_attributes(loader: Any) -> dict[str, Any]:
    """Return the attributes of a data loader that torch does not set, such as those of the user's subclass."""
    known = _torch_loader_attributes()
    found = {
        name: item for name, item in vars(loader).items() if name not in known and not name.startswith("_accel_nb")
    }
    return found | {_ITERATOR: StartedWorkers()} if has_started_workers(loader) else found


def set_loader_attributes(loader: Any, attributes: Mapping[str, Any]) -> None:
    """Set attributes that `loader_attributes` has returned in the sending process; what has started here stays."""
    kept = {name: item for name, item in attributes.items() if name != _ITERATOR or vars(loader)[_ITERATOR] is None}
    set_attributes(loader, kept, is_complete=False)


def reduce_loader(loader: Any) -> Any:
    """Reduce a loader that has started worker processes; these are not sent."""
    make, arguments, state, *rest = loader.__reduce_ex__(4)
    return make, arguments, {**state, _ITERATOR: StartedWorkers()}, *rest


@functools.cache
def _torch_loader_attributes() -> frozenset[str]:
    torch = sys.modules["torch"]
    return frozenset(vars(torch.utils.data.DataLoader([0])))
