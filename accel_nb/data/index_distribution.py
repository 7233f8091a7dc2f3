"""Distribution of an epoch's indices: the same order on every rank, and each rank yields its share.

torch's own samplers draw from the default CPU generator, or from their own, when the first batch is requested. Rank 0
draws as in a run without accel_nb; its generator states are sent once, and the other ranks draw with these and then
restore their own. Other samplers may draw from any generator at any time; they may depend on variables of the training
loop, and the loop on their attributes. If all ranks read whole batches, they compute the same, and each runs the
sampler as in a run without accel_nb. Otherwise only rank 0 runs it, and sends the indices of each batch.
"""

from __future__ import annotations

import copy
import operator
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, Subset

from accel_nb.data import position
from accel_nb.data.order import (
    BatchShare,
    contiguous_share,
    distribute_indices,
    even_length,
    flag_last,
    grouped,
    num_global_batches,
    whole_batch_share,
)
from accel_nb.data.sampler import SeedableRandomSampler, SeededOrder
from accel_nb.errors import MisuseError
from accel_nb.runtime import rng
from accel_nb.runtime.process.user_code import warn_at_user_line

if TYPE_CHECKING:
    from accel_nb.runtime.distributed.communicator import Communicator


class ReadMode:
    """The way in which ranks read the next batches of a loader; set between two batches, on all ranks alike."""

    def __init__(self) -> None:
        # Whether every rank reads all samples of each batch.
        self.is_whole = False
        # Whether the last batch must be marked: without a length, the next one is then read before each is yielded.
        self.reads_ahead = True
        # Called before the second batch of an iteration is read, and before each one after that.
        self.before_next: Callable[[], object] | None = None
        # Called with each batch, before the loop receives it.
        self.on_batch: Callable[[Any], object] | None = None
        # Called when an iteration is read to its end.
        self.on_end: Callable[[], object] | None = None


@dataclass(frozen=True)
class DataShard:
    """The part ``index`` of ``count`` of the data that this rank reads; ranks of one model replica read the same part.

    ``is_even``: every rank has equally many samples, with repeats if needed.
    """

    comm: Communicator
    index: int
    count: int
    batches_per_global_batch: int = 1
    is_even: bool = False
    mode: ReadMode = field(default_factory=ReadMode)

    def drops_incomplete(self, drop_last: bool) -> bool:
        """Return whether an incomplete global batch is dropped, as ranks have equally many samples without repeats."""
        return self.is_even and drop_last and self.batches_per_global_batch > 1

    def drops_incomplete_of(self, loader: DataLoader[Any]) -> bool:
        """Return whether an incomplete global batch of a loader is dropped, by its option or its batch sampler's."""
        return self.drops_incomplete(loader.drop_last or bool(getattr(loader.batch_sampler, "drop_last", False)))


class IndexSampler:
    """The sampler of the DataLoader that reads this rank's samples.

    It yields this rank's share of the indices that the sampler of the given loader draws. ``pending_shares``
    holds the shares of batches that the newest iteration has drawn and not yet delivered. Without ``yields_lists`` the
    items are not lists of samples, and are yielded unchanged. With ``seed``, torch's ``RandomSampler`` is replaced by
    one whose order depends on seed and epoch only.
    """

    def __init__(self, loader: DataLoader[Any], shard: DataShard, seed: int | None = None) -> None:
        self.pending_shares: deque[BatchShare] | None = None
        self.generators: list[torch.Generator] = []
        self.after_start: Callable[[], object] | None = None
        # The epoch of the next iteration.
        self.epoch = position.EpochProgress(shard.batches_per_global_batch, lambda: 0)
        self.yields_lists = loader.batch_sampler is not None or isinstance(loader.sampler, BatchSampler)
        # The samplers that replace the loader's own.
        self.replacements: tuple[Any, ...] = ()
        self.sampler: Iterable[Any] = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        if seed is not None:
            self.sampler, self.replacements = _seeded(self.sampler, seed)
        self._dataset = loader.dataset
        self._shard = shard
        self._drops_last = bool(getattr(self.sampler, "drop_last", False))
        self._comm = shard.comm
        self._batch_size = (
            (loader.batch_size or getattr(self.sampler, "batch_size", None)) if self.yields_lists else None
        )
        can_draw_everywhere = _can_draw_everywhere(self.sampler)
        self.is_drawn_everywhere = self._comm.world.size == 1 or can_draw_everywhere
        self._parts: tuple[rng.Part, ...] = ("torch",) if can_draw_everywhere else rng.ALL_PARTS
        # Whether the sampler may draw in its ``__iter__``; torch's own samplers draw before their first item.
        self.draws_at_start = not can_draw_everywhere
        self._is_random = self.is_drawn_everywhere and _may_draw(self.sampler)
        # Whether only rank 0 has drawn, so that the samplers of the other ranks have not advanced.
        self._is_behind = False

    def __iter__(self) -> Iterator[Any]:
        # The loader may create two iterators and use one: torch's samplers do nothing before the first item.
        self.pending_shares = shares = deque()
        if self.yields_lists:
            return self._record_shares(shares, self.iter_shares())
        return self._pass_unchanged(self._start_sampler())

    def __len__(self) -> int:
        return len(cast(Any, self.sampler))

    def set_even(self, is_even: bool) -> None:
        """Set whether the next iterations divide samples equally, with repeats."""
        self._shard = replace(self._shard, is_even=is_even)

    @property
    def _drops_short(self) -> bool:
        return self._shard.drops_incomplete(self._drops_last)

    def num_global_batches(self) -> int | None:
        """Return the number of global batches by the sampler's length; None without a length."""
        num_items = self.num_items()
        if num_items is None:
            return None
        return num_global_batches(num_items, self._shard.batches_per_global_batch, drop_short=self._drops_short)

    def num_items(self) -> int | None:
        """Return the number of batches, or samples, of the next iteration; None without a length."""
        return position.num_remaining(
            self.sampler, length_of(self.sampler), self.epoch.resumed, yields_lists=self.yields_lists
        )

    def capture_state(self) -> position.SamplerState:
        """Return the current state that the sampler's next epoch would be drawn from."""
        return position.capture_sampler_state(self.sampler, self.generators, rng.capture(parts=self._parts))

    def iter_shares(self) -> Iterator[tuple[Any, BatchShare]]:
        """Return an iterator over this rank's indices of each global batch, with their share.

        A sampler that is not torch's starts at once, as in a plain loader: it may draw in its ``__iter__``.
        """
        return self._iter_shares(self._start_sampler())

    def _iter_shares(self, started: Iterator[Any] | None) -> Iterator[tuple[Any, BatchShare]]:
        shard = self._shard
        count, index, size, num_batches = shard.count, shard.index, self._batch_size, shard.batches_per_global_batch
        limit = size if num_batches > 1 else None
        # Nearly all global batches of a loader have the same size: for these the share is computed once.
        full_size = self._full_batch_size()
        own_range = contiguous_share(full_size, count, index) if num_batches == 1 else range(full_size)
        start, stop, num_own, total = own_range.start, own_range.stop, len(own_range), full_size * num_batches
        number = index if num_batches > 1 else 0
        expected, is_last = self.num_global_batches(), False
        groups = self._start(num_batches, expected, started)
        fill = _samples_of(next(groups)[0]) if self._fills_from_earlier_samples else []
        for group, is_last in groups:
            if shard.mode.is_whole:
                merged = group[0] if len(group) == 1 else [sample for batch in group for sample in batch]
                yield merged, whole_batch_share(len(merged), count, index, is_last=is_last)
                continue
            if shard.is_even and not fill:
                fill = _samples_of(group)
            if len(group) == num_batches and len(group[-1]) == full_size:
                yield group[number][start:stop], BatchShare(num_own, total, is_last, False)
                continue
            even = even_length(sum(map(len, group)), count, size, num_batches) if shard.is_even else None
            yield distribute_indices(
                group, count, index, is_last=is_last, batch_size=limit, repeats=fill, num_even=even
            )
        warn_if_short(expected, is_last)

    def _full_batch_size(self) -> int:
        """Return the size of the batches of a full global batch.

        -1 if the size of the last batch does not show whether the global batch is full.
        """
        size, shard = self._batch_size, self._shard
        if type(self.sampler) is not BatchSampler or size is None:
            return -1
        if shard.batches_per_global_batch == 1 and (size < shard.count or (shard.is_even and size % shard.count)):
            return -1
        return size

    @staticmethod
    def _record_shares(shares: deque[BatchShare], pairs: Iterator[tuple[Any, BatchShare]]) -> Iterator[Any]:
        for indices, share in pairs:
            shares.append(share)
            yield indices

    def _pass_unchanged(self, started: Iterator[Any] | None) -> Iterator[Any]:
        for group, _ in self._start(1, self.num_items(), started):
            yield group[0]

    def draw(self, started: Iterator[Any] | None = None) -> Iterator[Any]:
        """Yield the sampler's items for `epoch`, drawn by this rank alone."""
        return position.draw_epoch(
            self.sampler,
            self.epoch,
            self.generators,
            yields_lists=self.yields_lists,
            parts=self._parts,
            started=started,
            num_first=self._shard.batches_per_global_batch if self._fills_from_earlier_samples else 0,
        )

    def _start_sampler(self) -> Iterator[Any] | None:
        """Start a sampler that may draw in its ``__iter__``, on the rank that draws, and then call ``after_start``."""
        if not self.draws_at_start or self.epoch.resumed is not None:
            return None
        if self.is_drawn_everywhere:
            return self._start_own_sampler()
        self._check()
        if self._draws_on_each_rank:
            with rank_0_random_states(self._comm, rng.ALL_PARTS, []):
                return self._start_own_sampler()
        self._is_behind = True
        started: list[Iterator[Any]] = []
        _call_on_rank_0(self._comm, lambda: started.append(self._start_own_sampler()), self._shard.mode)
        return started[0] if started else None

    def _start_own_sampler(self) -> Iterator[Any]:
        items = position.start_sampler(self.sampler, self.epoch, self.generators, parts=self._parts)
        if self.after_start is not None:
            self.after_start()
        return items

    def _check(self) -> torch.Tensor | None:
        """Check that the ranks iterate the same loader, and set its generators to rank 0's states; every rank calls.

        Returns the state of rank 0's torch generator if the sampler draws from it on every rank.
        """
        num_items = length_of(self.sampler) if self.is_drawn_everywhere else None
        rank_0_states = check_same_loaders(
            self._comm,
            self._dataset,
            num_items,
            self.generators,
            sampler=self.sampler if self.is_drawn_everywhere else None,
            sends_torch_state=self._is_random,
        )
        if self.generators:
            with rank_0_random_states(self._comm, (), self.generators):
                pass
        return rank_0_states

    def _start(
        self, size: int, expected: int | None, started: Iterator[Any] | None
    ) -> Iterator[tuple[list[Any], bool]]:
        """Yield the global batches of an epoch, the same ones on every rank, and whether each is the last."""
        if not self.is_drawn_everywhere:
            if self.epoch.resumed is not None:
                self._check()
            yield from self._global_batches_of_all(self._grouped_batches(size, expected, started))
            return
        with _forked_if_different(self._check()):
            groups = self._grouped_batches(size, expected, started)
            first = next(groups, None)
        if first is not None:
            yield from chain([first], groups)

    @property
    def _draws_on_each_rank(self) -> bool:
        """Whether each rank runs a sampler that is not torch's, as the samplers of all ranks are in the same state."""
        return self._shard.mode.is_whole and self.epoch.resumed is None and not self._is_behind

    def _global_batches_of_all(self, groups: Iterator[tuple[list[Any], bool]]) -> Iterator[tuple[list[Any], bool]]:
        """Yield the same global batches on every rank: each draws them itself, or all receive those of rank 0."""
        while True:
            if self._draws_on_each_rank:
                with rank_0_random_states(self._comm, rng.ALL_PARTS, []):
                    drawn = next(groups, None)
            else:
                self._is_behind = True
                drawn = _draw_on_rank_0(self._comm, groups, self._shard.mode)
            if drawn is None:
                return
            yield drawn

    @property
    def _fills_from_earlier_samples(self) -> bool:
        """Whether samples before the position of a resumed epoch are to be repeated.

        `_grouped_batches` then yields the epoch's first samples before its first global batch.
        """
        return self._shard.is_even and self.yields_lists and self.epoch.resumed is not None

    def _grouped_batches(
        self, size: int, expected: int | None, started: Iterator[Any] | None
    ) -> Iterator[tuple[list[Any], bool]]:
        items = self.draw(started)
        if self._fills_from_earlier_samples:
            yield [self.epoch.first_samples], False
        batches = map(_sized, items) if self.yields_lists else items
        groups = grouped(batches, size, drop_short=self._drops_short)
        yield from flag_last(
            groups, expected, is_exact=self.is_drawn_everywhere, reads_ahead=self._shard.mode.reads_ahead
        )


def _samples_of(group: list[Any]) -> list[Any]:
    return [sample for batch in group for sample in batch]


_ITERATION_TAG = -0x6E6F772C
"""The first number of a message at the start of an iteration; other messages do not start with it."""

_OTHER_CALL_MESSAGE = (
    "this rank begins to iterate a loader, and rank {rank} makes another call that all ranks must make, such as "
    "save_state or gather: look for one that only some of them reach, as below `if accelerator.is_main_process`"
)


def check_same_loaders(
    comm: Communicator,
    dataset: Any,
    num_batches: int | None,
    generators: list[torch.Generator],
    *,
    sampler: Any = None,
    sends_torch_state: bool = False,
) -> torch.Tensor | None:
    """Check that the loaders of all ranks agree; raise on every rank otherwise, instead of a hang later.

    Returns the state of rank 0's torch generator if ``sends_torch_state``; it is sent with the check.
    """
    if comm.world.size == 1:
        return None
    num_samples = length_of(dataset)
    numbers = [-1 if number is None else number for number in (num_batches, num_samples, len(generators))]
    subset = dataset if isinstance(dataset, Subset) else None
    numbers += [sends_torch_state, _fingerprint(subset), _fingerprint(sampler)]
    message = torch.tensor([_ITERATION_TAG, *numbers], dtype=torch.int64, device="cpu").view(torch.uint8)
    # The message has the same length on every rank, as the collective requires.
    state = torch.get_rng_state() if sends_torch_state else torch.zeros_like(torch.default_generator.get_state())
    gathered = comm.all_gather(torch.cat([message, state]))
    tags, rows = [], []
    for part in gathered:
        tag, *row = part[: message.numel()].clone().view(torch.int64).tolist()
        tags.append(tag)
        rows.append(row)
    if tags != [_ITERATION_TAG] * len(tags):
        raise MisuseError(
            _OTHER_CALL_MESSAGE.format(rank=next(rank for rank, tag in enumerate(tags) if tag != _ITERATION_TAG))
        )
    if any(row != rows[0] for row in rows):
        raise MisuseError(_describe_differences(rows))
    # A copy, since torch reads a state from the start of its storage.
    return gathered[0][message.numel() :].clone() if sends_torch_state else None


def _fingerprint(holder: Any) -> int:
    """Return a checksum of a few samples of a subset or torch sampler, to detect differences between ranks."""
    while isinstance(holder, BatchSampler):
        holder = getattr(holder, "sampler", None)
    samples = (
        holder if isinstance(holder, list | tuple) else getattr(holder, "indices", getattr(holder, "weights", None))
    )
    if not isinstance(samples, list | tuple | torch.Tensor | np.ndarray) or len(samples) == 0:
        return 0
    few: Any = samples[:: max(1, len(samples) // 16)]
    return zlib.crc32(str([_as_number(item) for item in few]).encode())


def _as_number(item: Any) -> Any:
    if isinstance(item, list | tuple):
        return [_as_number(inner) for inner in item[:16]]
    if isinstance(item, torch.Tensor | np.ndarray | np.generic):
        return item.item() if item.ndim == 0 else 0
    return item if isinstance(item, int | float | str) else 0


def _describe_differences(rows: list[list[int]]) -> str:
    names = ("batches", "samples", "generators")
    lines = [
        f"rank {rank}: " + ", ".join(f"{count} {name}" for count, name in zip(row, names, strict=False) if count >= 0)
        for rank, row in enumerate(rows)
    ]
    if len({tuple(row[:3]) for row in rows}) > 1:
        return (
            "the ranks iterate loaders of different length: "
            + "; ".join(lines)
            + ". Every rank must build the same dataset and sampler; accel_nb divides them among the ranks"
        )
    if len({row[3] for row in rows}) > 1:
        return (
            "the ranks iterate loaders with different kinds of samplers (one draws at random, another in order). "
            "Every rank must build the same loader; accel_nb divides it among the ranks"
        )
    what = "subset of the dataset (its indices)" if len({row[4] for row in rows}) > 1 else "sampler (its samples)"
    other = next(rank for rank, row in enumerate(rows) if row != rows[0])
    return (
        f"the {what} differs between rank 0 and rank {other}: samples would be lost and others read twice. "
        "Draw it with the same seed on every rank, as in "
        "random_split(dataset, lengths, generator=torch.Generator().manual_seed(0))"
    )


@contextmanager
def _forked_if_different(state: torch.Tensor | None) -> Iterator[None]:
    """Run the block with this state of torch's generator, unless it is the current one already."""
    if state is None or torch.equal(state, torch.get_rng_state()):
        yield
        return
    with rng.fork_rng({"torch": state}):
        yield


@contextmanager
def rank_0_random_states(
    comm: Communicator, libraries: tuple[rng.Part, ...], generators: list[torch.Generator]
) -> Iterator[None]:
    """Run the block with rank 0's global generator states; restore a rank's own states afterwards.

    States that equal rank 0's are not restored, so they advance as on rank 0. ``generators`` are set to rank 0's states
    permanently.
    """
    if comm.world.size == 1 or not (libraries or generators):
        yield
        return
    own = rng.capture(parts=libraries)
    own.update({f"generator{number}": generator.get_state() for number, generator in enumerate(generators)})
    message = comm.broadcast(rng.pack(own), 0)
    if comm.world.rank == 0:
        yield
        return
    rank_0_states = rng.unpack(message, own)
    for number, generator in enumerate(generators):
        generator.set_state(rank_0_states.pop(f"generator{number}"))
    different = {
        name.removesuffix("_gauss") for name, state in rank_0_states.items() if not torch.equal(state, own[name])
    }
    with rng.fork_rng(
        {name: state for name, state in rank_0_states.items() if name.removesuffix("_gauss") in different}
    ):
        yield


def _draw_on_rank_0(
    comm: Communicator, groups: Iterator[tuple[list[Any], bool]], mode: ReadMode
) -> tuple[list[Any], bool] | None:
    """Return rank 0's next global batch on every rank, None at the end; other ranks do not iterate theirs."""
    drawn: tuple[list[Any], bool] | None = None

    def draw() -> dict[str, Any]:
        nonlocal drawn
        drawn = next(groups, None)
        return {} if drawn is None else {"group": _as_json(drawn[0]), "is_last": drawn[1]}

    message = _call_on_rank_0(comm, draw, mode)
    if drawn is None and "group" in message:
        return _from_json(message["group"]), message["is_last"]
    return drawn


def _call_on_rank_0(comm: Communicator, call: Callable[[], dict[str, Any] | None], mode: ReadMode) -> dict[str, Any]:
    """Call a function of the sampler on rank 0, and return its result on every rank; every rank must call.

    If every rank reads whole batches, all ranks' random states are equal, and advance as on rank 0.
    """
    if comm.world.rank == 0:
        before = rng.capture_cpu() if mode.is_whole else None
        try:
            message = call() or {}
        except Exception as error:
            comm.broadcast_json({"error": f"{type(error).__name__}: {error}"}, 0)
            raise
        if before is not None and rng.capture_cpu() != before:
            message["has_drawn"] = True
        comm.broadcast_json(message, 0)
    else:
        message = cast("dict[str, Any]", comm.broadcast_json(None, 0))
        if "error" in message:
            raise MisuseError(f"rank 0, which draws for all ranks, failed in the sampler: {message['error']}")
    if message.pop("has_drawn", False):
        states = rng.capture()
        rng.restore(rng.unpack(comm.broadcast(rng.pack(states), 0), states))
    return message


def _as_json(index: Any) -> Any:
    kind = type(index)
    if kind is list:
        return index if all(type(item) is int for item in index) else [_as_json(item) for item in index]
    if index is None or kind in (int, str, float, bool):
        return index
    if kind is tuple:
        return {"tuple": [_as_json(item) for item in index]}
    if isinstance(index, torch.Tensor | np.ndarray) and index.ndim:
        return index.tolist()
    try:
        return operator.index(index)
    except TypeError:
        raise MisuseError(
            f"the sampler yields an index of type {kind.__name__}, which cannot be sent to the other ranks: "
            "it must yield integers, strings, or lists and tuples of them"
        ) from None


def _from_json(message: Any) -> Any:
    if isinstance(message, list):
        return [_from_json(item) for item in message]
    if isinstance(message, dict):
        return tuple(_from_json(item) for item in message["tuple"])
    return message


def _sized(batch: Any) -> Any:
    return batch if isinstance(batch, list | tuple) else list(batch)


def length_of(items: Any) -> int | None:
    """Return ``len(items)``, or None without a length."""
    try:
        return len(items)
    except (TypeError, NotImplementedError, AttributeError):
        return None


def _can_draw_everywhere(sampler: Any) -> bool:
    """Return whether every rank may iterate a sampler: it draws at the start, or from its own generator."""
    if type(sampler) is BatchSampler:
        return _can_draw_everywhere(sampler.sampler)
    if isinstance(sampler, list | tuple | range | torch.Tensor | np.ndarray):
        return True
    return isinstance(sampler, SeededOrder) or type(sampler).__module__.partition(".")[0] == "torch"


def _may_draw(sampler: Any) -> bool:
    """Return whether a torch sampler may draw from the global generator at the start."""
    if type(sampler) is BatchSampler:
        return _may_draw(sampler.sampler)
    if isinstance(sampler, SeededOrder) or type(sampler) in (SequentialSampler, list, tuple, range):
        return False
    return getattr(sampler, "generator", None) is None


def _seeded(sampler: Any, seed: int) -> tuple[Any, tuple[Any, ...]]:
    """Return the sampler with its ``RandomSampler`` replaced by a seeded one, and the new samplers, if any."""
    if _is_torch_class(sampler, RandomSampler):
        seeded = SeedableRandomSampler.like(sampler, seed=seed)
        return seeded, (seeded,)
    if isinstance(sampler, BatchSampler) or _is_torch_class(sampler, BatchSampler):
        inner, replaced = _seeded(getattr(sampler, "sampler", None), seed)
        if replaced:
            is_torch_sampler = _is_torch_class(sampler, BatchSampler)
            outer = (
                BatchSampler(inner, sampler.batch_size, sampler.drop_last) if is_torch_sampler else copy.copy(sampler)
            )
            outer.sampler = inner
            return outer, (*replaced, outer)
    return sampler, ()


def _is_torch_class(sampler: Any, kind: type[Any]) -> bool:
    """Return whether a sampler is of the class ``kind`` of torch, or of torchdata's class with the same order."""
    own = type(sampler)
    return own is kind or (own.__name__ == kind.__name__ and own.__module__.startswith("torchdata."))


def own_generators(loader: DataLoader[Any]) -> list[torch.Generator]:
    """Return the generators of the loader and its samplers, each once."""
    sampler: Any = loader.batch_sampler
    found = [loader.generator, getattr(loader.sampler, "generator", None), getattr(sampler, "generator", None)]
    while (sampler := getattr(sampler, "sampler", None)) is not None:
        found.append(getattr(sampler, "generator", None))
    unique = {id(generator): generator for generator in found if isinstance(generator, torch.Generator)}
    return list(unique.values())


def warn_if_short(expected: int | None, is_last: bool) -> None:
    """Warn if an epoch ended before the last batch by the loader's length."""
    if expected and not is_last:
        warn_at_user_line(
            f"the length of a loader is {expected} batches, but it yielded fewer, so that its last batch could not be "
            "marked as such (an open accumulation window stays open): correct __len__ of its sampler or dataset"
        )
