"""Release of prepared objects that code can no longer use, such as the model of a past run."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from itertools import chain
from typing import Any

from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from accel_nb.accelerator.core import Accelerator
from accel_nb.accelerator.plain_cells.detection.object_graph import find_training_objects


def release_unreachable(accelerator: Accelerator, namespace: dict[str, Any], within: Iterable[Any] = ()) -> None:
    """Release prepared objects that neither the notebook nor ``within`` references, such as the model of a past run."""
    objects = accelerator.prepared_objects
    if not objects:
        return
    reachable = {id(item) for item in chain(find_training_objects(list(namespace.values())), within)}
    reachable |= {id(item.optimizer) for item in objects if isinstance(item, LRScheduler) and id(item) in reachable}
    unreachable = [item for item in objects if id(item) not in reachable]
    accelerator.components.preparer.release(unreachable)
    has_cycles = any(isinstance(item, nn.Module) for item in unreachable)
    del objects, unreachable
    if has_cycles and accelerator.components.stepper.strategy.capabilities.shards_params:
        gc.collect()  # objects that `fully_shard` adds to a model reference it
