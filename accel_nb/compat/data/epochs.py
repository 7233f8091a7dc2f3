"""Epochs of prepared loaders: as in accelerate, a loader itself sets the epoch of its sampler and dataset."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from accel_nb.data.loader import SkippedBatchesLoader, get_position, read_mode
from accel_nb.runtime.tensors.instance_patching import patch_instance, plain_class


def count_epochs(loader: Any) -> None:
    """Make a prepared loader set its epoch at each iteration: ``iteration``, the number of those read to the end.

    A class that defines ``iteration`` itself is not changed.
    """
    kind = type(loader)
    if "base_dataloader" in vars(kind) or hasattr(plain_class(loader), "iteration"):
        return
    vars(loader).setdefault("iteration", 0)
    own_iter, own_set = kind.__iter__, kind.set_epoch

    def __iter__(self: Any) -> Iterator[Any]:
        self.set_epoch(self.iteration)
        return own_iter(self)

    def set_epoch(self: Any, epoch: int) -> None:
        vars(self)["iteration"] = epoch
        own_set(self, epoch)

    members: dict[str, Any] = {
        "__iter__": __iter__,
        "__reduce_ex__": kind.__reduce_ex__,
        "set_epoch": set_epoch,
        "base_dataloader": property(lambda self: self),
        "skip_batches": 0,
    }
    patch_instance(loader, members, plain_class(loader))
    of_loader = weakref.ref(loader)

    def count() -> None:
        own = of_loader()
        if own is not None:
            vars(own)["iteration"] += 1

    read_mode(loader).on_end = count


def set_iteration(loader: Any) -> None:
    """Set the epoch of a loader's next iteration to that of the checkpoint that was loaded."""
    if "iteration" in vars(loader):
        vars(loader)["iteration"] = get_position(loader).num_epochs


class LoaderWithoutFirstBatches(SkippedBatchesLoader):
    """A prepared loader without its first batches, whose iteration is one of the loader's epochs."""

    def __iter__(self) -> Iterator[Any]:
        if "iteration" in vars(self._loader):
            self._loader.set_epoch(self._loader.iteration)  # pyright: ignore[reportAttributeAccessIssue]
        return super().__iter__()
