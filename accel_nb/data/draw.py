"""The same order on every rank: who draws the indices of an epoch, and with which random numbers.

torch's own samplers draw from the default CPU generator, or from one of their own, when the first batch is asked for.
Rank 0 draws there as a plain run would; its generator states are sent once, and the other ranks draw with them and then
go on with their own. Samplers that torch did not define may draw from anything at any time: rank 0 alone runs them and
sends the indices of each batch.
"""

from __future__ import annotations

import operator
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader

from accel_nb.data.order import Share, deal, grouped, mark_last, num_groups
from accel_nb.errors import MisuseError
from accel_nb.runtime import rng

if TYPE_CHECKING:
    from accel_nb.runtime.comm import Communicator


class IndexFeed:
    """The inner loader's sampler: draws what the loader's own would draw, and gives out this rank's part of it.

    ``latest`` holds the shares of the batches drawn by the newest iteration and not yet delivered. Where ``deals`` is
    false the items are not lists of samples, and pass unchanged.
    """

    def __init__(self, loader: DataLoader[Any], comm: Communicator, group_size: int) -> None:
        self.latest: deque[Share] | None = None
        self.generators: list[torch.Generator] = []
        self.deals = loader.batch_sampler is not None or isinstance(loader.sampler, BatchSampler)
        self._draws_from: Iterable[Any] = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        self._dataset = loader.dataset
        self._comm = comm
        self._group_size = group_size
        self._batch_size = (loader.batch_size or getattr(loader.sampler, "batch_size", None)) if self.deals else None
        self._is_drawn_everywhere = comm.world.size == 1 or _is_of_torch(self._draws_from)

    def __iter__(self) -> Iterator[Any]:
        # The loader may ask twice and use one: nothing happens before the first item.
        self.latest = shares = deque()
        return self._deal(shares) if self.deals else self._pass_on()

    def __len__(self) -> int:
        return len(cast(Any, self._draws_from))

    def num_groups(self) -> int | None:
        """How many global batches the sampler says it will draw, if it does."""
        num_items = length_of(self._draws_from)
        return None if num_items is None else num_groups(num_items, self._group_size)

    def _deal(self, shares: deque[Share]) -> Iterator[Any]:
        world = self._comm.world
        batch_size = self._batch_size if self._group_size > 1 else None
        expected, is_last = self.num_groups(), False
        for group, is_last in self._start(self._group_size, expected):
            indices, mine = deal(group, world.size, world.rank, is_last=is_last, batch_size=batch_size)
            shares.append(mine)
            yield indices
        warn_if_short(expected, is_last)

    def _pass_on(self) -> Iterator[Any]:
        for group, _ in self._start(1, length_of(self._draws_from)):
            yield group[0]

    def _start(self, size: int, expected: int | None) -> Iterator[tuple[list[Any], bool]]:
        """Yield the groups of an epoch, the same ones on every rank, and whether each is the last."""
        num_items = length_of(self._draws_from) if self._is_drawn_everywhere else None
        check_equal_loaders(self._comm, self._dataset, num_items, self.generators)
        if not self._is_drawn_everywhere:
            with drawing_as_rank_0(self._comm, (), self.generators):
                pass
        batches = map(_sized, self._draws_from) if self.deals else iter(self._draws_from)
        groups = mark_last(grouped(batches, size), expected)
        if not self._is_drawn_everywhere:
            yield from _sent_by_rank_0(self._comm, groups)
            return
        with drawing_as_rank_0(self._comm, ("torch",), self.generators):
            first = next(groups, None)
        if first is not None:
            yield from chain([first], groups)


def check_equal_loaders(
    comm: Communicator, dataset: Any, num_batches: int | None, generators: list[torch.Generator]
) -> None:
    """Raise on every rank where the loaders differ, before one of them waits for batches that never come."""
    if comm.world.size == 1:
        return
    num_samples = length_of(dataset)
    mine = [-1 if number is None else number for number in (num_batches, num_samples, len(generators))]
    rows = [row.tolist() for row in comm.all_gather(torch.tensor(mine, dtype=torch.int64))]
    if all(row == rows[0] for row in rows):
        return
    names = ("batches", "samples", "generators")
    lines = [
        f"rank {rank}: " + ", ".join(f"{count} {name}" for count, name in zip(row, names, strict=True) if count >= 0)
        for rank, row in enumerate(rows)
    ]
    raise MisuseError(
        "the ranks iterate loaders of different length: "
        + "; ".join(lines)
        + ". Every rank must build the same dataset and sampler; accel_nb divides them among the ranks"
    )


@contextmanager
def drawing_as_rank_0(
    comm: Communicator, parts: tuple[rng.Part, ...], generators: list[torch.Generator]
) -> Iterator[None]:
    """Run the block with rank 0's global generators; afterwards a rank goes on with its own.

    A rank whose state equals rank 0's stays in step with it. ``generators`` become equal to rank 0's for good.
    """
    if comm.world.size == 1 or not (parts or generators):
        yield
        return
    own = rng.capture(parts=parts)
    own.update({f"generator{number}": generator.get_state() for number, generator in enumerate(generators)})
    message = comm.broadcast(rng.pack(own), 0)
    if comm.world.rank == 0:
        yield
        return
    theirs = rng.unpack(message, own)
    for number, generator in enumerate(generators):
        generator.set_state(theirs.pop(f"generator{number}"))
    different = {name.removesuffix("_gauss") for name, state in theirs.items() if not torch.equal(state, own[name])}
    with rng.forked({name: state for name, state in theirs.items() if name.removesuffix("_gauss") in different}):
        yield


def _sent_by_rank_0(comm: Communicator, groups: Iterator[tuple[list[Any], bool]]) -> Iterator[tuple[list[Any], bool]]:
    """Yield rank 0's ``groups`` on every rank, one message for each; only rank 0's own are ever drawn."""
    is_last = False
    while not is_last:
        if comm.world.rank == 0:
            try:
                drawn = next(groups, None)
                message = {} if drawn is None else {"group": _as_json(drawn[0]), "is_last": drawn[1]}
            except Exception as error:
                comm.broadcast_json({"error": f"{type(error).__name__}: {error}"}, 0)
                raise
            comm.broadcast_json(message, 0)
        else:
            message = cast("dict[str, Any]", comm.broadcast_json(None, 0))
            if "error" in message:
                raise MisuseError(f"rank 0, which draws for all ranks, failed in the sampler: {message['error']}")
            drawn = (_from_json(message["group"]), message["is_last"]) if message else None
        if drawn is None:
            return
        yield drawn
        is_last = drawn[1]


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
            "let it yield integers, strings, or lists and tuples of them"
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
    """Return ``len(items)``, or None where there is none."""
    try:
        return len(items)
    except (TypeError, NotImplementedError, AttributeError):
        return None


def _is_of_torch(sampler: Any) -> bool:
    """Whether every rank may draw from it: it uses random numbers when it starts, or from its own generator."""
    if type(sampler) is BatchSampler:
        return _is_of_torch(sampler.sampler)
    if isinstance(sampler, list | tuple | range | torch.Tensor | np.ndarray):
        return True
    return type(sampler).__module__.partition(".")[0] == "torch"


def own_generators(loader: DataLoader[Any]) -> list[torch.Generator]:
    """Return the generators that the loader and its samplers bring along, each once."""
    sampler: Any = loader.batch_sampler
    found = [loader.generator, getattr(loader.sampler, "generator", None), getattr(sampler, "generator", None)]
    while (sampler := getattr(sampler, "sampler", None)) is not None:
        found.append(getattr(sampler, "generator", None))
    unique = {id(generator): generator for generator in found if isinstance(generator, torch.Generator)}
    return list(unique.values())


def warn_if_short(expected: int | None, is_last: bool) -> None:
    """Warn if an epoch ended before the batch that its length announced as the last."""
    if expected and not is_last:
        warnings.warn(
            f"a loader announced {expected} batches by its length and gave fewer, so that its last batch could not be "
            "marked as such (an open accumulation window stays open): correct __len__ of its sampler or dataset",
            stacklevel=3,
        )
