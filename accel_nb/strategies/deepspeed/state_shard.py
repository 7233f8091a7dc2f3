"""This rank's shards of optimizer state, which code of plain cells reads and changes like full tensors."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from accel_nb.runtime.distributed import sharded
from accel_nb.runtime.distributed.sharded import FlatShard
from accel_nb.runtime.tensors.state_tree import map_state
from accel_nb.strategies.deepspeed.partitioned_parameter import is_called_inside
from accel_nb.strategies.deepspeed.whole_states import WholeStates


def make_state_shard(values: Tensor, shard: FlatShard, states: WholeStates) -> Any:
    """Return a `StateShard` in the memory of ``values``.

    Full tensors that are gathered from it are recorded in ``states``.
    """
    made: Any = values.as_subclass(StateShard)
    vars(made)["_accel_nb_states"] = states
    return sharded.register_flat_shard(made, shard)


class StateShard(Tensor):
    """A shard with which functions compute as with the full tensor, while all ranks run the same user code."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not sharded.reads_together() or is_called_inside(sys._getframe(1)):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        found: dict[int, tuple[StateShard, Tensor, int]] = {}

        def gather(value: Any) -> Any:
            if not isinstance(value, StateShard):
                return value
            if id(value) not in found:
                whole = sharded.full_tensor(value)
                found[id(value)] = value, whole, whole._version
            return found[id(value)][1]

        whole_args, whole_kwargs = map_state(gather, (args, kwargs))
        result = func(*whole_args, **whole_kwargs)
        for value, whole, version in found.values():
            if whole._version != version:
                sharded.copy_into(value, whole)
            vars(value)["_accel_nb_states"].add(value, whole)  # the result may be a view, which code writes into
        return next((value for value, whole, _ in found.values() if result is whole), result)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a copy of the full tensor if all ranks copy, else of this rank's shard."""
        memo[id(self)] = copied = self._as_plain().clone()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Reduce to the full tensor if all ranks do, else to this rank's shard."""
        return self._as_plain().__reduce_ex__(protocol)

    def _as_plain(self) -> Tensor:
        if sharded.can_read_full():
            return sharded.full_tensor(self)
        return self.detach().as_subclass(Tensor)
