"""The position of a loader in its epochs, stored in checkpoints, and resumption of an epoch from there.

A position is one global sample index. It does not depend on the number of ranks, so any number of them can resume: each
draws the order of the epoch again, from the same random states, and skips the samples before the position.
"""

from __future__ import annotations

import base64
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from accel_nb.data.order import BatchShare, grouped
from accel_nb.data.sampler import SeedableRandomSampler, set_epoch
from accel_nb.errors import CheckpointError
from accel_nb.runtime import rng

_END = object()
_NUM_COMPARED = 16
_DTYPES = {"uint8": torch.uint8, "int64": torch.int64, "float64": torch.float64}


@dataclass(frozen=True)
class SamplerState:
    """The random and sampler states at the start of an epoch, and a fingerprint of its first samples."""

    random: rng.RngStates = field(default_factory=dict)
    generators: tuple[Tensor, ...] = ()
    epoch: int | None = None
    sampler: Any = None
    num_compared: int = 0
    fingerprint: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return values that JSON supports; a sampler's own state must consist of such values."""
        return {
            "random": {name: _encode_tensor(value) for name, value in self.random.items()},
            "generators": [_encode_tensor(value) for value in self.generators],
            "epoch": self.epoch,
            "sampler": self.sampler,
            "compared": [self.num_compared, self.fingerprint],
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> SamplerState:
        """Return the state that `to_json` returned as values."""
        return cls(
            {name: _decode_tensor(value) for name, value in values["random"].items()},
            tuple(_decode_tensor(value) for value in values["generators"]),
            values["epoch"],
            values["sampler"],
            *values["compared"],
        )


@dataclass(frozen=True)
class LoaderPosition:
    """The completed epochs of a loader, and its progress in the current one.

    ``num_samples`` counts samples in the order of one process, ``num_batches`` the loader's own batches.
    ``sampler_state`` is the state that the epoch (between epochs: the next one) is drawn from. ``dataset_state`` is the
    dataset's own state after these batches, if it has one. ``seed`` is the seedable sampler's, ``num_parts`` the number
    of ranks with separate data.
    """

    num_epochs: int = 0
    num_samples: int = 0
    num_batches: int = 0
    sampler_state: SamplerState | None = None
    dataset_state: Any = None
    seed: int | None = None
    num_parts: int = 1
    is_within_epoch: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "epochs": self.num_epochs,
            "seen": self.num_samples,
            "batches": self.num_batches,
            "drawing": None if self.sampler_state is None else self.sampler_state.to_json(),
            "stream": self.dataset_state,
            "seed": self.seed,
            "parts": self.num_parts,
            "inside": self.is_within_epoch,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> LoaderPosition:
        """Return the position that `to_json` returned as values; raises `CheckpointError` for other values."""
        try:
            drawing = values["drawing"]
            position = cls(
                values["epochs"],
                values["seen"],
                values["batches"],
                None if drawing is None else SamplerState.from_json(drawing),
                values["stream"],
                values["seed"],
                values["parts"],
                values["inside"],
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"the position of a loader cannot be read: {error}") from None
        counts = (position.num_epochs, position.num_samples, position.num_batches, position.num_parts)
        if not all(type(count) is int and count >= 0 for count in counts):
            raise CheckpointError(f"the position of a loader holds invalid counts: {counts}")
        return position


class EpochProgress:
    """Progress of one training iteration over a loader, and the position where it was resumed."""

    def __init__(
        self, batches_per_global_batch: int, num_trained: Callable[[], int], resumed: LoaderPosition | None = None
    ) -> None:
        self.resumed = resumed
        self.num_samples = 0 if resumed is None else resumed.num_samples
        self.num_batches = 0 if resumed is None else resumed.num_batches
        self.sampler_state: SamplerState | None = None
        # Of a resumed epoch: its first samples, which were read before.
        self.first_samples: list[Any] = []
        self.latest_share: BatchShare | None = None
        self.is_over = False
        self.snapshots: DatasetSnapshots | None = None
        self._batches_per_global_batch = batches_per_global_batch
        self._num_trained = num_trained
        self._mark = 0

    def record_batch(self, share: BatchShare) -> None:
        """Record that a batch is yielded; the previous one has been used."""
        previous = self.latest_share
        if previous is not None:
            self.num_samples += previous.total_samples - previous.total_repeated
            self.num_batches += self._batches_per_global_batch
        self.latest_share = share
        self._mark = self._num_trained()

    def count_trained(self, *, includes_latest: bool = False) -> tuple[int, int]:
        """Return the number of samples, and of the loader's batches, that were trained on.

        With ``includes_latest`` the batch that was yielded last counts in any case.
        """
        latest = self.latest_share
        if latest is None or (self._num_trained() <= self._mark and not includes_latest):
            return self.num_samples, self.num_batches
        return (
            self.num_samples + latest.total_samples - latest.total_repeated,
            self.num_batches + self._batches_per_global_batch,
        )


class DatasetSnapshots(Iterator[Any]):
    """Iterator over batches that stores the dataset's state after each batch that is not trained on yet."""

    def __init__(self, source: Iterator[Any], dataset: Any, epoch: EpochProgress) -> None:
        self._source = source
        self._dataset = dataset
        self._epoch = epoch
        self._number = epoch.num_batches
        self._states: deque[tuple[int, Any]] = deque()
        self._store_state()

    def __next__(self) -> Any:
        batch = next(self._source)
        self._number += 1
        self._store_state()
        return batch

    def state_after(self, batches: int) -> Any:
        """Return the state after ``batches`` batches; None if it is not stored."""
        found = [state for number, state in self._states if number <= batches]
        return found[-1] if found else None

    def _store_state(self) -> None:
        while len(self._states) > 1 and self._states[1][0] <= self._epoch.num_batches:
            self._states.popleft()
        self._states.append((self._number, deepcopy(self._dataset.state_dict())))


def is_stateful(dataset: Any) -> bool:
    """Return whether a dataset has ``state_dict`` and ``load_state_dict``, by the convention of torchdata."""
    return callable(getattr(dataset, "state_dict", None)) and callable(getattr(dataset, "load_state_dict", None))


def draw_epoch(
    sampler: Any,
    epoch: EpochProgress,
    generators: list[torch.Generator],
    *,
    yields_lists: bool,
    parts: tuple[rng.Part, ...],
    started: Iterator[Any] | None = None,
    num_first: int = 0,
) -> Iterator[Any]:
    """Return an iterator over a sampler's items from the resumed position on, and record the state they are drawn from.

    The first item is drawn before this returns; in a resumed epoch with the random states of its start.
    ``yields_lists``: the items are lists of samples. ``parts`` are the global generators that the sampler may use.
    ``started`` is the result of `start_sampler` for this epoch, if it was called. The samples of the first
    ``num_first`` batches of a resumed epoch are recorded too, as far as they are before its position.
    """
    resumed = epoch.resumed
    if resumed is None:
        items = start_sampler(sampler, epoch, generators, parts=parts) if started is None else started
        first = next(items, _END)
        if first is not _END and epoch.sampler_state is not None:
            head = _head(first, yields_lists)
            epoch.sampler_state = replace(epoch.sampler_state, num_compared=len(head), fingerprint=_checksum(head))
    elif resumed.sampler_state is None:  # a new epoch, of which the first samples are skipped
        epoch.sampler_state = capture_sampler_state(sampler, generators, rng.capture(parts=parts))
        items = _remaining(sampler, epoch, resumed, yields_lists, num_first)
        first = next(items, _END)
    else:
        epoch.sampler_state = resumed.sampler_state
        restore_sampler_state(resumed.sampler_state, sampler, generators)
        with rng.fork_rng(resumed.sampler_state.random):
            items = _remaining(sampler, epoch, resumed, yields_lists, num_first)
            first = next(items, _END)
    return iter(()) if first is _END else chain([first], items)


def start_sampler(
    sampler: Any, epoch: EpochProgress, generators: list[torch.Generator], *, parts: tuple[rng.Part, ...]
) -> Iterator[Any]:
    """Return the sampler's iterator for a new epoch, and record the state that it is drawn from."""
    epoch.sampler_state = capture_sampler_state(sampler, generators, rng.capture(parts=parts))
    return iter(sampler)


def capture_sampler_state(
    sampler: Any, generators: list[torch.Generator], random: rng.RngStates | None = None
) -> SamplerState:
    """Return the current state that the next epoch would be drawn from; ``random`` are the global generators."""
    holders = _holders(sampler)
    states = tuple(generator.get_state() for generator in generators)
    return SamplerState(random or {}, states, _epoch_of(holders), _state_of(holders))


def restore_sampler_state(state: SamplerState, sampler: Any, generators: list[torch.Generator]) -> None:
    """Restore the states of a loader's generators and sampler."""
    holders = _holders(sampler)
    for generator, saved in zip(generators, state.generators, strict=False):
        generator.set_state(saved.clone())
    if state.epoch is not None:
        set_epoch(state.epoch, *holders)
    holder = next((holder for holder in holders if is_stateful(holder)), None)
    if holder is not None and state.sampler is not None:
        holder.load_state_dict(deepcopy(state.sampler))


def num_remaining(
    sampler: Any, num_items: int | None, resumed: LoaderPosition | None, *, yields_lists: bool
) -> int | None:
    """Return the number of items that `draw_epoch` yields, if the sampler has a length."""
    if resumed is None or num_items is None:
        return num_items
    if yields_lists and type(sampler) is BatchSampler:
        left = max(len(sampler.sampler) - resumed.num_samples, 0)  # type: ignore[arg-type]
        size = sampler.batch_size
        return left // size if sampler.drop_last else -(-left // size)
    return max(num_items - resumed.num_batches, 0)


def _remaining(
    sampler: Any, epoch: EpochProgress, resumed: LoaderPosition, yields_lists: bool, num_first: int
) -> Iterator[Any]:
    state = epoch.sampler_state or SamplerState()
    if yields_lists and type(sampler) is BatchSampler:
        wanted = num_first * sampler.batch_size
        head, rest = _from(sampler.sampler, resumed.num_samples, max(state.num_compared, wanted))
        _check_fingerprint(state, head)
        epoch.first_samples = head[:wanted]
        return grouped(rest, sampler.batch_size, drop_short=sampler.drop_last)
    items = iter(sampler)
    if resumed.num_batches:
        first = list(islice(items, min(max(num_first, 1), resumed.num_batches)))
        _check_fingerprint(state, _head(first[0], yields_lists) if first else [])
        epoch.first_samples = [sample for batch in first[:num_first] for sample in batch]
        items = islice(items, max(resumed.num_batches - len(first), 0), None)
    return items


_CONVERTED_AT_ONCE = 1 << 14
"""Indices converted to Python integers at a time, so that the first batch does not wait for all."""


def _from(sampler: Any, start: int, num_head: int) -> tuple[list[Any], Iterator[Any]]:
    """Return the first indices of a sampler, and all from ``start`` on; without iteration for torch's usual ones."""
    order = _order(sampler)
    if order is not None:
        head = order[:num_head] if start else order[:0]
        parts = (order[first : first + _CONVERTED_AT_ONCE] for first in range(start, len(order), _CONVERTED_AT_ONCE))
        return list(_plain(head)), chain.from_iterable(map(_plain, parts))
    indices = iter(sampler)
    head = list(islice(indices, min(num_head, start)))
    return head, islice(indices, max(start - len(head), 0), None)


def _order(sampler: Any) -> range | Tensor | None:
    """Return the whole order of a torch sampler, drawn as the sampler does; None for others.

    The first samples are compared with the fingerprint of the epoch, which detects other versions of torch.
    """
    if type(sampler) is SequentialSampler:
        return range(len(sampler))
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.generator is None:
        length = len(sampler.data_source)
        if sampler.num_samples == length:
            seed = int(torch.empty((), dtype=torch.int64).random_().item())
            return torch.randperm(length, generator=torch.Generator().manual_seed(seed))
    if type(sampler) is SeedableRandomSampler:
        return sampler.draw_order()
    return None


def _plain(order: range | Tensor) -> Sequence[int]:
    return order if isinstance(order, range) else order.tolist()


def _head(item: Any, yields_lists: bool) -> list[Any]:
    return list(item[:_NUM_COMPARED]) if yields_lists and isinstance(item, list | tuple) else [item]


def _checksum(head: list[Any]) -> int:
    return zlib.crc32(repr(head).encode())


def _check_fingerprint(state: SamplerState, head: list[Any]) -> None:
    """Raise if the epoch starts with other samples than before: some would be lost and others repeated."""
    head = head[: state.num_compared]
    if state.num_compared and len(head) == state.num_compared and _checksum(head) != state.fingerprint:
        raise CheckpointError(
            "the sampler draws another order than when the checkpoint was saved, so samples would be lost "
            "and others repeated: build the loader over the same dataset; a custom sampler must draw from torch's, "
            "NumPy's or Python's generator when it is iterated, or have state_dict and load_state_dict"
        )


def _holders(sampler: Any) -> list[Any]:
    inner = getattr(sampler, "sampler", None)
    return [sampler] if inner is None else [sampler, inner]


def _epoch_of(holders: list[Any]) -> int | None:
    found = [getattr(holder, "epoch", None) for holder in holders if callable(getattr(holder, "set_epoch", None))]
    return next((epoch for epoch in found if type(epoch) is int), None)


def _state_of(holders: list[Any]) -> Any:
    holder = next((holder for holder in holders if is_stateful(holder)), None)
    return None if holder is None else deepcopy(holder.state_dict())


def _encode_tensor(value: Tensor) -> dict[str, Any]:
    name = str(value.dtype).removeprefix("torch.")
    return {"dtype": name, "bytes": base64.b64encode(value.contiguous().numpy().tobytes()).decode()}


def _decode_tensor(values: Mapping[str, Any]) -> Tensor:
    content = bytearray(base64.b64decode(values["bytes"], validate=True))
    return torch.frombuffer(content, dtype=_DTYPES[values["dtype"]]).clone()
