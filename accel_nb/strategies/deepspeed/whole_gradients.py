"""Full gradients that code reads and replaces, while ranks hold shards of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import replace

from torch import Tensor, nn

from accel_nb.errors import MisuseError
from accel_nb.runtime.distributed import sharded
from accel_nb.runtime.distributed.communicator import Communicator
from accel_nb.runtime.distributed.sharded import FlatShard

FlatGradientShards = Iterable[tuple[nn.Parameter, Tensor]]
"""This rank's flat shard of each gradient, from which the optimizer steps."""

_NUMBERS = itertools.count(1)


class WholeGradients:
    """The gradients that were read or replaced, and those that were dropped (set to None), until they are stored.

    ``shards`` are this rank's shards of the parameters, by id.
    """

    def __init__(self, shards: Mapping[int, FlatShard], comm: Communicator) -> None:
        self._shards = shards
        self._comm = comm
        # By id of the parameter.
        self._whole: dict[int, Tensor] = {}
        self._dropped: set[int] = set()
        # This rank's shards as other code reads them between cells.
        self._returned_shards: dict[int, Tensor] = {}

    @property
    def has_any(self) -> bool:
        """Whether code has read or replaced any gradients."""
        return bool(self._whole)

    def read(self, parameter: nn.Parameter, flat_shards: FlatGradientShards, example: Tensor) -> Tensor | None:
        """Return the full gradient of a parameter, None if it was dropped; every rank must call.

        ``example`` is a tensor of the gradients' dtype and device.
        """
        key = id(parameter)
        if key in self._dropped:
            return None
        if key not in self._whole:
            shard = _flat_shard(dict(flat_shards).get(parameter), example, self._shards[key])
            self._whole[key] = sharded.gather_full(shard, self._comm)
        return self._whole[key]

    def gradient_shard(
        self, parameter: nn.Parameter, flat_shards: FlatGradientShards, example: Tensor
    ) -> Tensor | None:
        """Return this rank's shard of the gradient of a parameter, None without one.

        It is the same tensor until gradients change.
        """
        if not self._returned_shards:
            number = next(_NUMBERS)
            found = {id(value): gradient for value, gradient in flat_shards}
            for key, shard in self._shards.items():
                if key not in self._dropped:
                    self._returned_shards[key] = _flat_shard(found.get(key), example, replace(shard, number=number))
        return self._returned_shards.get(id(parameter))

    def discard_shards(self) -> None:
        """Discard the shards that `gradient_shard` has returned, since gradients change."""
        self._returned_shards.clear()

    def replace(self, parameter: nn.Parameter, value: Tensor) -> bool:
        """Replace the gradient of a parameter, and return whether it was dropped before."""
        was_dropped = id(parameter) in self._dropped
        self._dropped.discard(id(parameter))
        self._whole[id(parameter)] = value
        self._returned_shards.clear()
        return was_dropped

    def discard(self, parameter: nn.Parameter) -> None:
        """Discard the gradient of a parameter that was read or replaced."""
        self._whole.pop(id(parameter), None)

    def drop(self, parameter: nn.Parameter) -> bool:
        """Drop the gradient of a parameter, and return whether all are dropped."""
        self._dropped.add(id(parameter))
        self._returned_shards.clear()
        return self._dropped >= self._shards.keys()

    def drop_all(self) -> None:
        """Drop all gradients, so that only those that are replaced exist."""
        self._dropped.update(self._shards)

    @property
    def are_partly_dropped(self) -> bool:
        """Whether code has dropped some gradients, or left them out."""
        return bool(self._dropped)

    def refuse_partly_dropped(self) -> None:
        """Raise `MisuseError` if some gradients were dropped: DeepSpeed steps all parameters."""
        if self._dropped:
            raise MisuseError(_PARTLY_DROPPED.format(dropped=len(self._dropped), all=len(self._shards)))

    def store(self, flat_shards: FlatGradientShards, *, keeps: bool = False) -> None:
        """Copy this rank's shards of the gradients that were read, and may have been changed, to ``flat_shards``.

        With ``keeps`` later changes of the gradients have effect too.
        """
        whole = self._whole
        if not keeps:
            self._whole = {}
        if whole:
            self._returned_shards.clear()
            for parameter, value in flat_shards:
                if id(parameter) in whole:
                    shard = self._shards[id(parameter)]
                    own = whole[id(parameter)].detach().reshape(-1).narrow(0, *shard.ranges[shard.rank])
                    value.view(-1).copy_(own)

    def clear(self) -> None:
        """Forget which gradients were read, replaced and dropped."""
        self._whole.clear()
        self._dropped.clear()
        self._returned_shards.clear()


def _flat_shard(found: Tensor | None, example: Tensor, shard: FlatShard) -> Tensor:
    """Return this rank's elements of a gradient as a sharded tensor; without ``found`` there are none."""
    own = (example.new_empty(0) if found is None else found).detach().view(-1)
    return sharded.register_flat_shard(own, shard)


_PARTLY_DROPPED = (
    "{dropped} of {all} gradients are None, which code has set or left out, and DeepSpeed steps all parameters of an "
    "optimizer: give the others an optimizer of their own, or train with --strategy ddp"
)
