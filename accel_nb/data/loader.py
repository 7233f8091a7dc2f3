"""Sharding a ``DataLoader`` in place: the same object, of which each rank reads its share.

Two ways to get at a share:

- *by index*: the loader has a batch sampler. An inner loader, equal but for the batch sampler, reads only the samples
  of this rank.
- *by slice*: the dataset is a stream or gives ready batches (``batch_size=None``). Every rank reads each batch whole
  and keeps its share of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, IterDataPipe, MapDataPipe

from accel_nb.data.draw import (
    IndexFeed,
    check_equal_loaders,
    drawing_as_rank_0,
    length_of,
    own_generators,
    warn_if_short,
)
from accel_nb.data.order import Share, grouped, is_short, mark_last, num_groups, share
from accel_nb.errors import MisuseError
from accel_nb.runtime import rng
from accel_nb.runtime.nested import concat_batches, first_batch_size, slice_batch, to_device

if TYPE_CHECKING:
    from accel_nb.runtime.comm import Communicator

T = TypeVar("T")
BatchMeaning = Literal["global", "per-worker"]

__all__ = ["BatchMeaning", "Share", "is_sharded", "shard", "unshard"]

_ATTRIBUTE = "_accel_nb_sharding"
_END = object()


def shard(
    loader: DataLoader[T],
    *,
    comm: Communicator,
    batch: BatchMeaning,
    device: torch.device | str,
    on_share: Callable[[Share | None], object],
    is_training: Callable[[], bool],
) -> DataLoader[T]:
    """Make ``loader`` yield this rank's share of each global batch, on ``device``; return the same object.

    ``batch="global"``: each batch of the loader is divided among the ranks, and its length stays. ``"per-worker"``:
    ``world.size`` consecutive batches make a global one, one for each rank, and ``len`` shrinks accordingly.

    - ``on_share`` is called just before each batch is yielded, and with None when the loader is exhausted.
    - ``is_training`` is asked when an iteration starts: where it says no, the rank reads the whole loader as if it had
      not been sharded (on ``device``), without any message and without ``on_share``.
    - Every rank must iterate the loader, in the same order among its loaders. Each epoch costs an all_gather and a
      broadcast at the first batch; a sampler that torch did not define, or an in-process stream, one broadcast a batch.
    - An ``IterableDataset`` must yield the same samples on every rank: do not split it by rank.
    - Batches come in the order of the sampler, whatever ``in_order`` says.
    - Sharding a sharded loader replaces the settings. Copying or pickling it gives a plain loader.

    Raises :class:`MisuseError` for what is no ``DataLoader`` and for one that is divided among the ranks already.
    """
    if not isinstance(loader, DataLoader):
        raise MisuseError(f"only a torch DataLoader can be sharded, not a {type(loader).__name__}")
    unshard(loader)
    if comm.world.size > 1:
        _refuse_divided(loader)
    plain = type(loader)
    setattr(loader, _ATTRIBUTE, _Sharding(plain, comm, batch, torch.device(device), on_share, is_training))
    loader.__class__ = _sharded_class(plain, has_own_length=batch == "per-worker")
    return loader


def unshard(loader: DataLoader[T]) -> DataLoader[T]:
    """Undo :func:`shard`; a plain loader is left as it is. Iterations under way go on as they were."""
    if is_sharded(loader):
        loader.__class__ = _sharding(loader).plain
        delattr(loader, _ATTRIBUTE)
    return loader


def is_sharded(loader: object) -> bool:
    """Whether :func:`shard` changed this object."""
    return _ATTRIBUTE in getattr(loader, "__dict__", ())


def _sharding(loader: DataLoader[Any]) -> _Sharding:
    return loader.__dict__[_ATTRIBUTE]


def _sharded_class(plain: type[DataLoader[Any]], *, has_own_length: bool) -> type[DataLoader[Any]]:
    """Return a subclass for one instance; it goes by the name of ``plain``, and its copies are of ``plain``."""

    def __iter__(self: DataLoader[Any]) -> Iterator[Any]:
        return _sharding(self).iterate(self)

    def __len__(self: DataLoader[Any]) -> int:
        return _sharding(self).length(self)

    def __reduce_ex__(self: DataLoader[Any], protocol: Any) -> Any:
        # Protocol 1 names the class as an argument; later ones insist that it is the class of the pickled object.
        return _plain_twin(self, plain).__reduce_ex__(1)

    body: dict[str, Any] = {
        "__module__": plain.__module__,
        "__qualname__": plain.__qualname__,
        "__doc__": plain.__doc__,
        "__iter__": __iter__,
        "__reduce_ex__": __reduce_ex__,
    }
    if has_own_length:
        body["__len__"] = __len__
    return cast(Any, type(plain))(plain.__name__, (plain,), body)


def _plain_twin(loader: DataLoader[Any], plain: type[DataLoader[Any]]) -> DataLoader[Any]:
    # By way of __dict__, since a DataLoader refuses to have most attributes set after its construction.
    twin = object.__new__(plain)
    twin.__dict__.update({name: value for name, value in loader.__dict__.items() if name != _ATTRIBUTE})
    return twin


class _Sharding:
    """What a sharded loader carries: its settings, and the inner loader that reads for it."""

    def __init__(
        self,
        plain: type[DataLoader[Any]],
        comm: Communicator,
        batch: BatchMeaning,
        device: torch.device,
        on_share: Callable[[Share | None], object],
        is_training: Callable[[], bool],
    ) -> None:
        self.plain = plain
        self._comm = comm
        self._group_size = comm.world.size if batch == "per-worker" else 1
        self._device = device
        self._on_share = on_share
        self._is_training = is_training
        # Kept from epoch to epoch, so that persistent workers survive.
        self._inner: DataLoader[Any] | None = None
        self._feed: IndexFeed | None = None
        self._worker_seeds = torch.Generator()

    def length(self, loader: DataLoader[Any]) -> int:
        num_batches = self.plain.__len__(loader)
        return num_groups(num_batches, self._group_size) if self._is_training() else num_batches

    def iterate(self, loader: DataLoader[Any]) -> Iterator[Any]:
        move = self._mover(loader)
        if not self._is_training():
            whole = self.plain.__iter__(loader)
            return whole if move is None else map(move, whole)
        inner = self._updated_inner(loader)
        if isinstance(loader.dataset, IterableDataset):
            return self._iterate_stream(loader, inner, move)
        feed = cast(IndexFeed, self._feed)
        feed.generators = own_generators(loader)
        if self._comm.world.rank > 0:
            inner.generator = self._seed_workers_apart(loader, inner)
        feed.latest = None
        source = iter(inner)
        if feed.deals:
            return _Delivery(source, feed, self._on_share, move)
        return self._by_slice(source, feed.num_groups(), loader.batch_size, move)

    def _mover(self, loader: DataLoader[Any]) -> Callable[[Any], Any] | None:
        device = self._device
        if device.type == "cpu":
            return None
        non_blocking = device.type == "cuda" and bool(loader.pin_memory)
        return lambda batch: to_device(batch, device, non_blocking)

    def _updated_inner(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        if self._inner is None:
            self._inner = _plain_twin(loader, self.plain)
            self._inner._iterator = None
            if not isinstance(loader.dataset, IterableDataset):
                self._feed = IndexFeed(loader, self._comm, self._group_size)
        inner = self._inner
        # What may be set on a loader at any time, such as collate_fn, counts from the next iteration on.
        inner.__dict__.update({name: value for name, value in loader.__dict__.items() if not name.startswith("_")})
        if self._feed is not None:
            name = "sampler" if loader.batch_sampler is None else "batch_sampler"
            # Out of order, the shares of one step would be of different batches.
            inner.__dict__.update({name: self._feed, "in_order": True})
        return inner

    def _seed_workers_apart(self, loader: DataLoader[Any], inner: DataLoader[Any]) -> torch.Generator:
        """Return the generator of this rank's worker seeds: other seeds than rank 0's, drawn as a plain run draws."""
        if inner._iterator is None:  # persistent workers keep the seed that they started with
            drawn = torch.empty((), dtype=torch.int64).random_(generator=loader.generator).item()
            self._worker_seeds.manual_seed(rng.derive(int(drawn), "loader", self._comm.world.rank))
        return self._worker_seeds

    def _iterate_stream(
        self, loader: DataLoader[Any], inner: DataLoader[Any], move: Callable[[Any], Any] | None
    ) -> Iterator[Any]:
        comm = self._comm
        expected = None
        # With worker processes the length is a guess, and looking ahead is free.
        if not loader.num_workers and (num_samples := length_of(loader.dataset)) is not None:
            size = loader.batch_size or 1
            expected = num_groups(
                num_samples // size if loader.drop_last else -(-num_samples // size), self._group_size
            )
        generators = own_generators(loader)
        check_equal_loaders(comm, loader.dataset, None, generators)
        with drawing_as_rank_0(comm, rng.ALL_PARTS, generators):
            source = iter(inner)  # starts the dataset's iterator, or the workers that do
        if not loader.num_workers and comm.world.size > 1:
            source = self._fetch_in_step(source)
        return self._by_slice(source, expected, loader.batch_size, move)

    def _fetch_in_step(self, source: Iterator[Any]) -> Iterator[Any]:
        # The stream draws in this process, from the generators that the model draws from as well.
        while True:
            with drawing_as_rank_0(self._comm, rng.ALL_PARTS, []):
                batch = next(source, _END)
            if batch is _END:
                return
            yield batch

    def _by_slice(
        self,
        source: Iterator[Any],
        expected: int | None,
        batch_size: int | None,
        move: Callable[[Any], Any] | None,
    ) -> Iterator[Any]:
        is_last = False
        for group, is_last in mark_last(grouped(source, self._group_size), expected):
            batch, mine = self._cut(group, batch_size, is_last)
            self._on_share(mine)
            yield batch if move is None else move(batch)
        self._on_share(None)
        warn_if_short(expected, is_last)

    def _cut(self, group: list[Any], batch_size: int | None, is_last: bool) -> tuple[Any, Share]:
        """Return this rank's part of a group of collated batches; every rank holds the same group."""
        rank, size = self._comm.world.rank, self._comm.world.size
        found = [first_batch_size(batch) for batch in group]
        sizes = [1 if number is None else number for number in found]
        total = sum(sizes)
        limit = batch_size if self._group_size > 1 else None
        if not is_short(sizes, size, limit) and all(sizes):
            return group[rank], Share(sizes[rank], total, is_last, False)
        whole = _joined(group) if None not in found else None
        if whole is None:  # nothing to slice: whole batches to the first ranks
            if rank < len(group) and sizes[rank]:
                return group[rank], Share(sizes[rank], total, is_last, False)
            return slice_batch(group[0], 0, 1), Share(0, total, is_last, True)
        mine = share(total, size, rank)
        if not mine and total:
            return slice_batch(whole, 0, 1), Share(0, total, is_last, True)
        return slice_batch(whole, mine.start, mine.stop), Share(len(mine), total, is_last, False)


class _Delivery(Iterator[Any]):
    """The batches of the inner loader, each announced by the share that its indices were dealt as."""

    __slots__ = ("_feed", "_move", "_on_share", "_shares", "_source")

    def __init__(
        self,
        source: Iterator[Any],
        feed: IndexFeed,
        on_share: Callable[[Share | None], object],
        move: Callable[[Any], Any] | None,
    ) -> None:
        self._source = source
        self._feed = feed
        self._shares = feed.latest  # None if the loader's own class starts on the first batch only
        self._on_share = on_share
        self._move = move

    def __next__(self) -> Any:
        if self._shares is None:
            self._feed.latest = None
        try:
            batch = next(self._source)
        except StopIteration:
            self._on_share(None)
            raise
        except Exception:
            if self._shares:
                self._shares.popleft()  # the batch that failed; the caller may go on with the next one
            raise
        if self._shares is None:
            self._shares = self._feed.latest
        if not self._shares:
            raise MisuseError("the loader yields more batches than its sampler draws: it cannot be divided by index")
        self._on_share(self._shares.popleft())
        return batch if self._move is None else self._move(batch)


def _refuse_divided(loader: DataLoader[Any]) -> None:
    sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    for candidate in (loader.sampler, sampler, getattr(sampler, "sampler", None)):
        if isinstance(candidate, DistributedSampler) and candidate.num_replicas > 1:
            raise MisuseError(
                f"the loader's DistributedSampler divides it among {candidate.num_replicas} ranks already: "
                "leave the sampler out (shuffle=True instead), or leave the loader out of what is prepared"
            )
    if isinstance(loader.dataset, IterDataPipe | MapDataPipe):
        raise MisuseError(
            "torch divides a datapipe among the ranks by itself: leave this loader out of what is prepared"
        )


def _joined(group: list[Any]) -> Any | None:
    try:
        return concat_batches(group)
    except ValueError:
        return None
