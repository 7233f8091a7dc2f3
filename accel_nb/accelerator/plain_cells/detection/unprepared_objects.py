"""The objects of a cell that are to be prepared."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from accel_nb.accelerator.plain_cells.detection.distributed_objects import select_preparable
from accel_nb.accelerator.plain_cells.detection.lazy_models import LazyModels
from accel_nb.accelerator.prepare.preparer import ObjectsByKind
from accel_nb.runtime.tensors.stepped import stepped_parameters


@dataclass(frozen=True)
class UnpreparedObjects:
    """Objects of a cell that can be prepared and are not yet: root modules only, without duplicates."""

    modules: tuple[nn.Module, ...] = ()
    optimizers: tuple[Optimizer, ...] = ()
    schedulers: tuple[LRScheduler, ...] = ()
    loaders: tuple[DataLoader[Any], ...] = ()

    @property
    def objects(self) -> tuple[Any, ...]:
        """All objects, in the order of preparation."""
        return (*self.modules, *self.optimizers, *self.schedulers, *self.loaders)


def find_unprepared(
    objects: Sequence[Any],
    prepared: Container[Any],
    prepared_optimizers: Iterable[Optimizer],
    lazy_models: LazyModels,
) -> UnpreparedObjects:
    """Find the ``objects``, and the optimizers of schedulers among them, that are not ``prepared`` yet.

    Models with lazy layers, and objects that user code has distributed itself, are left out.
    """
    needed = [*objects, *(item.optimizer for item in objects if isinstance(item, LRScheduler))]
    if all(item in prepared for item in needed):
        return UnpreparedObjects()
    kinds = ObjectsByKind.sort(lazy_models.exclude_lazy(select_preparable(objects)))
    known = set(map(id, kinds.optimizers))
    scheduled = {id(scheduler.optimizer): scheduler.optimizer for scheduler in kinds.schedulers}
    optimizers = [*kinds.optimizers, *(item for key, item in scheduled.items() if key not in known)]
    inside = {id(part) for model in kinds.models for part in model.modules() if part is not model}
    stepped = {id(value) for item in (*optimizers, *prepared_optimizers) for value in stepped_parameters(item)}
    roots = [model for model in kinds.models if id(model) not in inside and model not in prepared]
    return UnpreparedObjects(
        modules=tuple(model for model in roots if not _is_untrained_meta_model(model, stepped)),
        optimizers=tuple(item for item in optimizers if item not in prepared),
        schedulers=tuple(item for item in kinds.schedulers if item not in prepared),
        loaders=tuple(item for item in kinds.loaders if item not in prepared),
    )


def _is_untrained_meta_model(model: nn.Module, stepped: Collection[int]) -> bool:
    """Return whether a model is on the meta device and not trained, as a template for `torch.func.functional_call`."""
    values = list(model.parameters())
    return any(value.is_meta for value in values) and not any(id(value) in stepped for value in values)
