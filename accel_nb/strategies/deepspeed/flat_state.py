"""The state of an optimizer, which a DeepSpeed engine keeps in flat tensors."""

from __future__ import annotations

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

_SINGLE = ("step", "eta", "mu", "mu_product")
"""Entries of which a parameter has one, where its only element does not show that."""


class FlatState:
    """Sets this rank's shards of the state of the ``inner`` optimizer in the user's, and loads what code sets there.

    ``flats`` are the flat tensors that the inner optimizer steps, with the parameters in them.
    """

    def __init__(self, optimizer: Optimizer, inner: Any, flats: Sequence[tuple[Any, list[FlatSlot]]]) -> None:
        self._optimizer = optimizer
        self._inner = inner
        self._flats = flats
        # What was set in the user's optimizer, with the version of what a write has no effect on.
        self._shown: dict[nn.Parameter, dict[str, tuple[Any, int | None]]] = {}
        self._load(optimizer.state)
        # Entries that a flat shard has once, such as a step count, are copied whenever the state is read.
        self._on_read = [
            optimizer.register_state_dict_pre_hook(lambda _: self._update_shown()),
            optimizer.register_state_dict_post_hook(_gather_state),
        ]

    def load(self, states: Mapping[nn.Parameter, Mapping[str, Any]], whole: Callable[[Any], Any]) -> None:
        """Replace the state by ``states``; ``whole`` reads one of its tensors. Every rank must call."""
        self._optimizer.state.clear()
        self._inner.state.clear()
        self._load(states, whole)

    def load_changes(self) -> None:
        """Load the state that code has set or removed in the user's optimizer since it was shown there, if it has."""
        if self._has_changed():
            states = {value: dict(entries) for value, entries in self._optimizer.state.items()}
            self._inner.state.clear()
            self._load(states)

    def _update_shown(self) -> None:
        if not self._has_changed():  # else the state is what code has set, until the next step
            self._show_singles()

    def _has_changed(self) -> bool:
        for _, places in self._flats:
            for place in places:
                entries, shown = self._optimizer.state.get(place.parameter, {}), self._shown.get(place.parameter, {})
                if entries.keys() != shown.keys():
                    return True
                for name, (value, version) in shown.items():
                    if entries[name] is not value or (version is not None and value._version != version):
                        return True
        return False

    def show_after_step(self) -> None:
        """Set the shards in the user's optimizer after a step, if it is the first one."""
        if not self._is_shown:
            self._show_shards()

    def release(self) -> None:
        """Update the user's optimizer for the last time."""
        self.load_changes()
        self._show_singles()
        for hook in self._on_read:
            hook.remove()

    def gather(self, comm: Communicator) -> dict[nn.Parameter, dict[str, Any]]:
        """Return the whole state of each parameter; every rank must call."""
        return {
            place.parameter: {
                name: sharded.gather_full(value, comm) if sharded.is_sharded(value) else value
                for name, value in self._optimizer.state.get(place.parameter, {}).items()
            }
            for _, places in self._flats
            for place in places
        }

    def _load(self, states: Mapping[Any, Mapping[str, Any]], whole: Callable[[Any], Any] = lambda value: value) -> None:
        """Copy state, by parameter, into the flat tensors; missing entries count as zero."""
        for flat, places in self._flats:
            known = [states[place.parameter] for place in places if states.get(place.parameter)]
            if not known:
                continue
            counts = {float(whole(entries["step"])) for entries in known if "step" in entries}
            if len(counts) > 1:
                raise MisuseError(
                    f"parameters of one group of the {type(self._optimizer).__name__} were stepped "
                    f"{sorted(counts)} times, and DeepSpeed counts once for all: load this state before preparing, "
                    "or train by fsdp"
                )
            for name, example in known[0].items():
                if not _has_elements(name, places, states):
                    single = whole(example)
                    self._inner.state[flat][name] = single.clone() if isinstance(single, Tensor) else single
                    continue
                buffer = self._inner.state[flat][name] = torch.zeros_like(flat, requires_grad=False)
                for place in places:
                    value = states.get(place.parameter, {}).get(name)
                    if value is None:
                        continue
                    value = whole(value)
                    start, length = place.shard.ranges[place.shard.rank]
                    own = (
                        sharded.local_shard(value) if sharded.is_sharded(value) else value.reshape(-1)[start:][:length]
                    )
                    place.narrow(buffer).copy_(own)
        self._show_shards()

    def _show_shards(self) -> None:
        """Set this rank's shards of the state in the user's optimizer."""
        self._is_shown = any(self._inner.state.values())
        self._shown.clear()
        for flat, places in self._flats:
            for name, value in self._inner.state.get(flat, {}).items():
                for place in places:
                    is_single = _is_single(value, flat)
                    self._show(
                        place.parameter,
                        name,
                        _copy_single(value)
                        if is_single
                        else sharded.register_flat_shard(place.narrow(value), place.shard),
                        is_single=is_single,
                    )

    def _show_singles(self) -> None:
        for flat, places in self._flats:
            for name, value in self._inner.state.get(flat, {}).items():
                if _is_single(value, flat):
                    for place in places:
                        self._show(place.parameter, name, _copy_single(value), is_single=True)

    def _show(self, parameter: nn.Parameter, name: str, value: Any, *, is_single: bool) -> None:
        """Set an entry; only of a copy a write has no effect by itself, so its version is recorded."""
        self._optimizer.state[parameter][name] = value
        version = value._version if is_single and isinstance(value, Tensor) else None
        self._shown.setdefault(parameter, {})[name] = value, version


def _has_elements(name: str, places: list[FlatSlot], states: Mapping[Any, Mapping[str, Any]]) -> bool:
    """Return whether an entry of the state has one number for each element of a parameter."""
    found = [(place.shard.shape, states[place.parameter].get(name)) for place in places if states.get(place.parameter)]
    sized = [(shape, value) for shape, value in found if shape and value is not None]
    if not sized:
        return name not in _SINGLE
    return any(hasattr(value, "shape") and _shape_of(value) == shape for shape, value in sized)


def _copy_single(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _gather_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
    """Replace shards of tensors by whole ones where all ranks gather, as in a plain cell, whose code may save them."""
    if not sharded.can_read_full():
        return None
    whole = map_state(lambda leaf: sharded.full_tensor(leaf) if sharded.is_sharded(leaf) else leaf, state_dict)
    return cast(dict[str, Any], whole)


def _is_single(value: Any, flat: Tensor) -> bool:
    """Return whether an entry of the state is one for all of a flat tensor, and not one number for each element."""
    return not isinstance(value, Tensor) or value.shape != flat.shape


def _shape_of(value: Any) -> tuple[int, ...]:
    return sharded.full_shape(value) if isinstance(value, Tensor) else tuple(value.shape)
