"""The state of an optimizer, which a DeepSpeed engine keeps in flat tensors."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from accel_nb.errors import MisuseError
from accel_nb.runtime.distributed import sharded
from accel_nb.runtime.distributed.communicator import Communicator
from accel_nb.runtime.tensors.state_tree import map_state
from accel_nb.strategies.deepspeed.flat_shards import FlatSlot
from accel_nb.strategies.deepspeed.state_shard import make_state_shard
from accel_nb.strategies.deepspeed.whole_states import WholeStates

_SCALARS = ("step", "eta", "mu", "mu_product")
"""Names of state entries that are one scalar per parameter.

Needed for 0-dim parameters, whose scalar and per-element entries have the same shape.
"""


class FlatState:
    """Keeps the states of the user's optimizer and of ``inner``, DeepSpeed's optimizer, equal.

    It puts this rank's shards of the inner state into ``optimizer.state``, and copies changes that user code makes
    there back. ``flats`` are the flat tensors that the inner optimizer steps, with the parameters in them. Whole
    tensors of state dicts are recorded in ``states``.
    """

    def __init__(
        self, optimizer: Optimizer, inner: Any, flats: Sequence[tuple[Any, list[FlatSlot]]], states: WholeStates
    ) -> None:
        self._optimizer = optimizer
        self._inner = inner
        self._flats = flats
        self._states = states
        # All entries of the user's optimizer when the state was set there.
        self._shown: list[Any] = []
        # All entries of the inner optimizer at that time.
        self._inner_shown: list[Any] = []
        # Of each scalar entry of a flat tensor, such as a step count: the inner optimizer's state of that flat tensor,
        # the entry's name, a tensor with a copy for each parameter, and its version. User code has the copies: writing
        # to one does not change the inner optimizer, but the version shows the write, and `load_changes` applies it.
        self._scalars: list[tuple[dict[str, Any], str, Tensor, int]] = []
        self._load(optimizer.state)
        self._on_read = optimizer.register_state_dict_post_hook(self._gather_state)

    def load(self, states: Mapping[nn.Parameter, Mapping[str, Any]], read_full: Callable[[Any], Any]) -> None:
        """Replace the state by ``states``; ``read_full`` returns a whole tensor of it. Every rank must call."""
        self._optimizer.state.clear()
        self._inner.state.clear()
        self._load(states, read_full)

    def load_changes(self) -> None:
        """Load changes that code has made to the state of the user's optimizer since it was set there."""
        if self._has_changed():
            states = {value: dict(entries) for value, entries in self._optimizer.state.items()}
            self._inner.state.clear()
            self._load(states)

    def _has_changed(self) -> bool:
        if any(shown._version != version for _, _, shown, version in self._scalars):
            return True
        found = self._entries()
        return len(found) != len(self._shown) or any(map(operator.is_not, found, self._shown))

    def _entries(self) -> list[Any]:
        """Return the parameters, names and values of the user's optimizer's state, in the order of its dicts."""
        found: list[Any] = []
        for parameter, entries in self._optimizer.state.items():
            found.append(parameter)
            found += entries
            found += entries.values()
        return found

    def update_user_state(self) -> None:
        """Set this rank's state in the user's optimizer after a step.

        All of it is set after the first step, and if a step has replaced objects, such as a count that is an `int`.
        """
        found = self._inner_entries()
        has_others = len(found) != len(self._inner_shown) or any(map(operator.is_not, found, self._inner_shown))
        if not self._is_shown or has_others:
            self._show()
            return
        self._scalars = [
            (entries, name, shown.fill_(entries[name]), shown._version) for entries, name, shown, _ in self._scalars
        ]

    def release(self) -> None:
        """Load the last changes of the user's code, and stop gathering its state dicts."""
        self.load_changes()
        self._on_read.remove()

    def gather(self, comm: Communicator) -> dict[nn.Parameter, dict[str, Any]]:
        """Return the whole state of each parameter; every rank must call."""
        return {
            place.parameter: {
                name: sharded.gather_full(value, comm) if sharded.is_sharded(value) else _copy_value(value)
                for name, value in self._optimizer.state.get(place.parameter, {}).items()
            }
            for _, places in self._flats
            for place in places
        }

    def _load(
        self, states: Mapping[Any, Mapping[str, Any]], read_full: Callable[[Any], Any] = lambda value: value
    ) -> None:
        """Copy state, by parameter, into the flat tensors; missing entries count as zero."""
        for flat, places in self._flats:
            known = [states[place.parameter] for place in places if states.get(place.parameter)]
            if not known:
                continue
            counts = {float(read_full(entries["step"])) for entries in known if "step" in entries}
            if len(counts) > 1:
                raise MisuseError(
                    f"parameters of one group of the {type(self._optimizer).__name__} were stepped "
                    f"{sorted(counts)} times, and DeepSpeed counts once for all: load this state before preparing, "
                    "or train by fsdp"
                )
            for name, example in known[0].items():
                if not _has_elements(name, places, states):
                    self._inner.state[flat][name] = _copy_value(read_full(example))
                    continue
                buffer = self._inner.state[flat][name] = torch.zeros_like(flat, requires_grad=False)
                for place in places:
                    value = states.get(place.parameter, {}).get(name)
                    if value is None:
                        continue
                    value = read_full(value)
                    start, length = place.shard.ranges[place.shard.rank]
                    own = (
                        sharded.local_shard(value) if sharded.is_sharded(value) else value.reshape(-1)[start:][:length]
                    )
                    place.narrow(buffer).copy_(own)
        self._show()

    def _show(self) -> None:
        """Set this rank's shards of the state in the user's optimizer."""
        self._is_shown = any(self._inner.state.values())
        self._scalars.clear()
        for flat, places in self._flats:
            entries = self._inner.state.get(flat, {})
            for name, value in entries.items():
                if not _is_scalar(value, flat):
                    shown = [make_state_shard(place.narrow(value), place.shard, self._states) for place in places]
                elif isinstance(value, Tensor):
                    copies = value.detach().expand(len(places), *value.shape).clone()
                    shown = list(copies)
                    self._scalars.append((entries, name, copies, copies._version))
                else:
                    shown = [value] * len(places)
                for place, shard in zip(places, shown, strict=True):
                    self._optimizer.state[place.parameter][name] = shard
        self._shown, self._inner_shown = self._entries(), self._inner_entries()

    def _inner_entries(self) -> list[Any]:
        return [value for entries in self._inner.state.values() for value in entries.values()]

    def _gather_state(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        """Replace shards by full tensors if all ranks gather, as in a plain cell, which may save them."""
        if not sharded.can_read_full():
            return None
        return cast(dict[str, Any], map_state(self._read_whole, state_dict))

    def _read_whole(self, leaf: Any) -> Any:
        if not sharded.is_sharded(leaf):
            return leaf
        whole = sharded.full_tensor(leaf)
        self._states.add(leaf, whole)
        return whole


def _has_elements(name: str, places: list[FlatSlot], states: Mapping[Any, Mapping[str, Any]]) -> bool:
    """Return whether a state entry has one value for each element of a parameter."""
    found = [(place.shard.shape, states[place.parameter].get(name)) for place in places if states.get(place.parameter)]
    sized = [(shape, value) for shape, value in found if shape and value is not None]
    if not sized:
        return name not in _SCALARS
    return any(hasattr(value, "shape") and _shape_of(value) == shape for shape, value in sized)


def _copy_value(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _is_scalar(value: Any, flat: Tensor) -> bool:
    """Return whether a state entry has one value for a flat tensor, and not one for each element."""
    return not isinstance(value, Tensor) or value.shape != flat.shape


def _shape_of(value: Any) -> tuple[int, ...]:
    return sharded.full_shape(value) if isinstance(value, Tensor) else tuple(value.shape)
