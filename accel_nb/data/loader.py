"""Sharding a ``DataLoader`` in place: the same object, of which each rank reads its share.

Two ways to get at a share:

- *by index*: the loader has a batch sampler. Only the samples of this rank are read: in this process, or where there
  are worker processes or the loader's class iterates in its own way, by an inner loader that is equal but for the batch
  sampler.
- *by batch*: the dataset is a stream or gives ready batches (``batch_size=None``); see `accel_nb.data.streams`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, IterDataPipe, MapDataPipe

from accel_nb.config.sections import DataOptions
from accel_nb.data.dispatch import receive_dispatched
from accel_nb.data.fetch import build_reader
from accel_nb.data.index_batches import DrawnIndices, FetchedBatches, MatchedBatches
from accel_nb.data.index_distribution import (
    DataShard,
    IndexSampler,
    check_same_loaders,
    length_of,
    own_generators,
    rank_0_random_states,
)
from accel_nb.data.loader_observer import LoaderObserver
from accel_nb.data.order import BatchShare, flag_last, grouped, num_groups
from accel_nb.data.position import (
    DatasetSnapshots,
    EpochProgress,
    LoaderPosition,
    SamplerState,
    capture_sampler_state,
    is_stateful,
    restore_sampler_state,
)
from accel_nb.data.prefetch import BatchPrefetcher, BatchTransfer, SharedBatch, StreamTransfer
from accel_nb.data.sampler import set_epoch
from accel_nb.data.streams import BatchDivider, read_everywhere, read_own_shard
from accel_nb.errors import MisuseError
from accel_nb.runtime import rng
from accel_nb.runtime.devices.registry import device_type
from accel_nb.runtime.tensors.instance_patching import make_instance_class
from accel_nb.runtime.tensors.nested import first_batch_size, to_device

if TYPE_CHECKING:
    from accel_nb.runtime.distributed.communicator import Communicator

T = TypeVar("T")
BatchMeaning = Literal["global", "per-worker"]

__all__ = [
    "BatchMeaning",
    "LoaderObserver",
    "BatchShare",
    "reset_epochs",
    "is_sharded",
    "count_remaining",
    "get_position",
    "explain_no_resume",
    "resume_loader",
    "shard_loader",
    "skip_first_batches",
    "unshard_loader",
    "watch_batches",
]

_ATTRIBUTE = "_accel_nb_sharding"
_END = object()


def shard_loader(
    loader: DataLoader[T],
    *,
    comm: Communicator,
    batch: BatchMeaning,
    device: torch.device | str,
    observer: LoaderObserver,
    coords: tuple[int, int] | None = None,
    options: DataOptions | None = None,
    seed: int | None = None,
    transfer: BatchTransfer | None = None,
    place_batch: Callable[[Any], Any] | None = None,
) -> DataLoader[T]:
    """Make ``loader`` yield this rank's share of each global batch, on ``device``; return the same object.

    ``batch="global"``: each batch of the loader is divided among the ranks, and its length stays. ``"per-worker"``: as
    many consecutive batches as there are shares make a global one, one for each, and ``len`` shrinks accordingly.

    - ``observer`` decides which loops train, and receives the events of all loops. A batch counts as trained on when
      `LoaderObserver.num_trained` has grown by one since the batch was yielded, or when the next one is requested.
    - ``coords`` is which share of the data this rank reads, and how many there are; by default rank and world size.
      Ranks with the same coordinates read the same.
    - ``options`` is the section of the configuration about loaders; ``seed`` is what it falls back to for the order of
      ``use_seedable_sampler``. ``lane`` replaces the way in which batches are copied ahead of time.
    - ``place_batch`` returns a batch as it is yielded, if that is more than moving it to ``device``.
    - Every rank must iterate the loader, in the same order among its loaders. Each epoch costs an all_gather at the
      first batch; generators of its own, a sampler that torch did not define, a stream that is read or dispatched in
      this process, further messages.
    - A stream that is read whole must yield the same samples on every rank: do not split it by rank. What it does with
      ``get_worker_info`` to split itself among worker processes is left alone.
    - Batches come in the order of the sampler, whatever ``in_order`` says.
    - The loader has ``set_epoch``, ``total_batch_size``, ``total_dataset_length``, ``end_of_dataloader`` and
      ``remainder`` as well.
    - Sharding a sharded loader replaces the settings. Copying or pickling it gives a plain loader.

    Raises :class:`MisuseError` for what is no ``DataLoader`` and for one that is divided among the ranks already.
    """
    if not isinstance(loader, DataLoader):
        raise MisuseError(f"only a torch DataLoader can be sharded, not a {type(loader).__name__}")
    unshard_loader(loader)
    if comm.world.size > 1:
        _refuse_divided(loader)
    plain = type(loader)
    options = options or DataOptions()
    index, count = coords or (comm.world.rank, comm.world.size)
    place = DataShard(comm, index, count, count if batch == "per-worker" else 1, options.even_batches)
    sharding = _ShardedLoading(plain, place, torch.device(device), observer, options, seed, transfer, place_batch)
    setattr(loader, _ATTRIBUTE, sharding)
    loader.__class__ = _sharded_class(plain, has_own_length=batch == "per-worker")
    return loader


def unshard_loader(loader: DataLoader[T]) -> DataLoader[T]:
    """Undo :func:`shard`; a plain loader is left as it is. Iterations under way go on as they were."""
    if is_sharded(loader):
        loader.__class__ = _sharding(loader).plain
        delattr(loader, _ATTRIBUTE)
    return loader


def is_sharded(loader: object) -> bool:
    """Whether :func:`shard` changed this object."""
    return _ATTRIBUTE in getattr(loader, "__dict__", ())


def count_remaining(loader: DataLoader[Any], position: LoaderPosition) -> int | None:
    """Return how many samples of the epoch a sharded loader has left at ``position``, if that is known."""
    return _sharding(loader).count_remaining(loader, position)


def watch_batches(loader: DataLoader[Any], on_batch: Callable[[Any, BatchShare], object] | None) -> None:
    """Call ``on_batch`` with each batch that a sharded loader yields, and its share; None calls nothing."""
    _sharding(loader).on_batch = on_batch


def reset_epochs(loader: DataLoader[Any]) -> None:
    """Count a sharded loader's epochs from here."""
    _sharding(loader).reset_epochs()


def get_position(loader: DataLoader[Any]) -> LoaderPosition:
    """Return where a sharded loader is; what rank 0 returns is whole, and counts."""
    return _sharding(loader).position(loader)


def resume_loader(
    loader: DataLoader[Any],
    position: LoaderPosition,
    *,
    passes: bool = False,
    on_resume: Callable[[], object] | None = None,
) -> None:
    """Let a sharded loader's next iteration go on from ``position``; every rank must call.

    With ``passes`` as many iterations as epochs are over pass empty before that. ``on_resume`` is called when the first
    batch after that is asked for. Ask `problem_with` first.
    """
    _sharding(loader).resume(loader, position, passes, on_resume)


def explain_no_resume(loader: DataLoader[Any], position: LoaderPosition) -> str | None:
    """Return why a sharded loader cannot go on from ``position``, such as a stream that does not know where it was."""
    return _sharding(loader).explain_no_resume(loader, position)


def skip_first_batches(dataloader: DataLoader[T], num_batches: int = 0) -> SkippedBatchesLoader:
    """Return what iterates a prepared loader without this rank's first batches; they are not read.

    After `Accelerator.load_state` there is no need to: a prepared loader goes on by itself. Every rank must call.
    Raises `MisuseError` for a loader that is not prepared, and for what is no number of batches.
    """
    if not is_sharded(dataloader):
        raise MisuseError("skip_first_batches takes a loader that is prepared: call prepare(loader) first")
    if not isinstance(num_batches, int) or num_batches < 0:
        raise MisuseError(f"skip_first_batches got {num_batches!r} batches; it takes a whole number of at least 0")
    return SkippedBatchesLoader(dataloader, num_batches)


def _sharding(loader: DataLoader[Any]) -> _ShardedLoading:
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

    body: dict[str, Any] = {"__iter__": __iter__, "__reduce_ex__": __reduce_ex__}
    if has_own_length:
        body["__len__"] = __len__
    known = {
        "set_epoch": lambda self, epoch: _sharding(self).set_epoch(self, epoch),
        "total_batch_size": property(lambda self: _sharding(self).total_batch_size(self)),
        "total_dataset_length": property(lambda self: len(self.dataset)),
        "end_of_dataloader": property(lambda self: _sharding(self).is_at_end),
        "remainder": property(lambda self: _sharding(self).remainder(self)),
    }
    body.update({name: value for name, value in known.items() if name == "set_epoch" or not hasattr(plain, name)})
    return make_instance_class(plain, plain, body)


def _plain_twin(loader: DataLoader[Any], plain: type[DataLoader[Any]]) -> DataLoader[Any]:
    # By way of __dict__, since a DataLoader refuses to have most attributes set after its construction.
    twin = object.__new__(plain)
    twin.__dict__.update({name: value for name, value in loader.__dict__.items() if name != _ATTRIBUTE})
    return twin


class _ShardedLoading:
    """What a sharded loader carries: its settings, and what reads for it."""

    def __init__(
        self,
        plain: type[DataLoader[Any]],
        place: DataShard,
        device: torch.device,
        observer: LoaderObserver,
        options: DataOptions,
        seed: int | None,
        lane: BatchTransfer | None,
        place_batch: Callable[[Any], Any] | None,
    ) -> None:
        self.plain = plain
        self.observer = observer
        self.on_batch: Callable[[Any, BatchShare], object] | None = None
        # The share delivered last; None before the first one of an iteration.
        self.latest: BatchShare | None = None
        self._place = place
        self._comm = place.comm
        self._device = device
        self._options = options
        self._seed = seed if options.data_seed is None else options.data_seed
        self._lane = lane
        self._side_stream: StreamTransfer | None = None
        # Kept from epoch to epoch, so that persistent workers survive.
        self._inner: DataLoader[Any] | None = None
        self._feed: IndexSampler | None = None
        self._worker_seeds = torch.Generator()
        # What a dataset that divides itself gave this rank.
        self._own_part: Any = None
        self._place_batch = place_batch
        self._num_epochs = 0
        self._epoch: EpochProgress | None = None
        # What the next iterations are to be: empty ones, then one from a position.
        self._num_empty = 0
        self._resumed: LoaderPosition | None = None
        self._on_resume: Callable[[], object] | None = None

    def length(self, loader: DataLoader[Any]) -> int:
        num_batches = self.plain.__len__(loader)
        return self._num_groups(loader, num_batches) if self.observer.is_training() else num_batches

    def total_batch_size(self, loader: DataLoader[Any]) -> int | None:
        size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
        return None if size is None else size * self._place.group_size

    @property
    def is_at_end(self) -> bool:
        return self.latest is not None and self.latest.is_last

    def remainder(self, loader: DataLoader[Any]) -> int:
        """Return how many samples of the last global batch are no repeats, if it is short; -1 if that is not known."""
        total, length = self.total_batch_size(loader), length_of(loader.dataset)
        return -1 if not total or length is None or loader.drop_last else length % total

    def set_epoch(self, loader: DataLoader[Any], epoch: int) -> None:
        if hasattr(self.plain, "set_epoch"):
            self.plain.set_epoch(loader, epoch)  # pyright: ignore[reportAttributeAccessIssue]
        feed, sampler = self._build_sampler(loader), loader.batch_sampler
        inner: Any = getattr(sampler, "sampler", None)
        set_epoch(epoch, sampler, inner, loader.sampler, loader.dataset, feed and feed.seedable_sampler)
        if self._inner is not None and self._inner.dataset is not loader.dataset:
            set_epoch(epoch, self._inner.dataset)

    def iterate(self, loader: DataLoader[Any], skipped: int | None = None) -> Iterator[Any]:
        move = self._mover(loader)
        if not self.observer.on_epoch_start(loader):
            whole = self._iterate_whole(loader, move)
            return whole if skipped is None else islice(whole, skipped, None)
        self.end_epoch(self._epoch)
        if self._num_empty:
            self._num_empty -= 1
            self._num_epochs += 1
            return iter(())
        on_resume, self._on_resume = self._on_resume, None
        if on_resume is not None:
            on_resume()
        resumed, self._resumed = self._resumed, None
        if skipped is not None:
            resumed = self._after(loader, skipped, resumed)
        self.latest = None
        self._epoch = epoch = EpochProgress(self._place.group_size, self.observer.num_trained, resumed)
        pairs = self._pairs(loader, epoch)
        lane = self._transfer_for(loader)
        if lane is None:
            return _LoaderIterator(pairs, self, epoch, move)
        return _LoaderIterator(BatchPrefetcher(pairs, lane), self, epoch, None)

    def end_epoch(self, epoch: EpochProgress | None) -> None:
        """Count an epoch that is over, once: read to its end, or left for another."""
        if epoch is not None and not epoch.is_over:
            epoch.is_over = True
            self._num_epochs += 1

    def reset_epochs(self) -> None:
        """Count epochs from here; those that were still to pass empty belong to the run before."""
        self._num_epochs = self._num_empty = 0
        self._on_resume = None
        self._epoch = None

    def position(self, loader: DataLoader[Any]) -> LoaderPosition:
        epoch = self._epoch
        if self._resumed is not None:  # loaded, and not iterated since
            return self._resumed
        here = LoaderPosition(self._num_epochs + self._num_empty, seed=self._seed, num_parts=self._place.count)
        if epoch is not None and not epoch.is_over and epoch.sampler_state is not None:
            seen, batches = epoch.count_trained()
            stream = None if epoch.snapshots is None else epoch.snapshots.state_after(batches)
            return replace(
                here,
                num_samples=seen,
                num_batches=batches,
                sampler_state=epoch.sampler_state,
                dataset_state=stream,
                is_within_epoch=True,
            )
        feed = self._build_sampler(loader)
        return (
            here
            if feed is None
            else replace(here, sampler_state=capture_sampler_state(feed.sampler, own_generators(loader)))
        )

    def resume(
        self, loader: DataLoader[Any], position: LoaderPosition, passes: bool, on_resume: Callable[[], object] | None
    ) -> None:
        self._epoch = None
        self._num_epochs, self._num_empty = (0, position.num_epochs) if passes else (position.num_epochs, 0)
        self._resumed = position if position.is_within_epoch else None
        self._on_resume = on_resume
        if self._options.use_seedable_sampler and position.seed is not None and position.seed != self._seed:
            self._seed, self._feed = position.seed, None
        feed = self._build_sampler(loader)
        if feed is not None and position.sampler_state is not None and not position.is_within_epoch:
            restore_sampler_state(position.sampler_state, feed.sampler, own_generators(loader))

    def count_remaining(self, loader: DataLoader[Any], position: LoaderPosition) -> int | None:
        feed, sampler = self._build_sampler(loader), loader.batch_sampler
        inner: Any = getattr(sampler, "sampler", None)
        total = length_of(loader.dataset) if feed is None or inner is None else length_of(inner)
        if total is None:
            return None
        if loader.drop_last and loader.batch_size:
            total -= total % loader.batch_size
        return max(total - position.num_samples, 0)

    def explain_no_resume(self, loader: DataLoader[Any], position: LoaderPosition) -> str | None:
        """Return why the loader cannot go on from a position."""
        num_generators, drawing = len(own_generators(loader)), position.sampler_state
        is_stream = isinstance(loader.dataset, IterableDataset)
        if drawing is not None and not is_stream and num_generators != len(drawing.generators):
            return (
                f"the loader brings {num_generators} generators of its own, and {len(drawing.generators)} when the "
                "checkpoint was saved: give it as many, to its sampler or as generator="
            )
        if not is_stream or not position.num_batches:
            return None
        name = type(loader.dataset).__name__
        if self._divides_itself(loader) and not self._is_dispatched(loader):
            if position.num_parts != self._place.count:
                return (
                    f"the dataset {name} gives each rank files of its own, and was saved by {position.num_parts} ranks "
                    f"in the middle of an epoch: go on with as many, or save between epochs"
                )
        elif position.dataset_state is not None and is_stateful(loader.dataset) and not loader.num_workers:
            return None
        if self._options.resume_stream == "replay":
            return None
        return (
            f"the stream {name} cannot say where it was after {position.num_samples} samples: give it state_dict and "
            "load_state_dict and read it without worker processes, or set data.resume_stream to replay, which reads "
            "these samples again without training on them"
        )

    def _after(self, loader: DataLoader[Any], num_batches: int, resumed: LoaderPosition | None) -> LoaderPosition:
        """Return the position after so many of each rank's batches, in the epoch that is resumed or in a new one."""
        batches = num_batches * self._place.group_size
        seen = batches * (loader.batch_size or getattr(loader.batch_sampler, "batch_size", None) or 1)
        if resumed is None:
            return LoaderPosition(self._num_epochs, seen, batches)
        if resumed.num_batches != batches:
            warnings.warn(
                f"skip_first_batches({num_batches}) goes to batch {batches} of the loader, and the checkpoint that was "
                f"loaded is at batch {resumed.num_batches}: leave skip_first_batches out, as a prepared loader "
                "goes on by itself",
                stacklevel=4,
            )
        return replace(resumed, num_samples=seen, num_batches=batches, dataset_state=None)

    def _iterate_whole(self, loader: DataLoader[Any], move: Callable[[Any], Any] | None) -> Iterator[Any]:
        if loader.batch_sampler is not None and self._reads_here(loader):
            indices = iter(loader.batch_sampler)
            self._draw_base_seed(loader)
            source = map(build_reader(loader), indices)
        else:
            source = self.plain.__iter__(loader)
        return _WholeIterator(source, self.observer, move)

    def _pairs(self, loader: DataLoader[Any], epoch: EpochProgress) -> Iterator[SharedBatch]:
        """Start an epoch: this rank's batches, and what they are of their global batches."""
        feed = self._build_sampler(loader)
        if feed is not None:
            feed.epoch = epoch
            feed.generators = own_generators(loader)
        if self._is_dispatched(loader):
            return self._dispatch(loader, epoch)
        if feed is None:
            return self._iterate_stream(loader, epoch)
        is_new = epoch.resumed is None or not epoch.resumed.is_within_epoch
        if feed.yields_lists and self._reads_here(loader):
            if is_new:
                self._draw_base_seed(loader)
            return FetchedBatches(feed, loader)
        inner = self._updated_inner(loader)
        # An epoch that goes on has drawn the seed of its workers before: the next draw is not of these.
        with nullcontext() if is_new else rng.fork_rng(parts=("torch",)):
            if self._place.index > 0:
                inner.generator = self._seed_workers_apart(loader, inner)
            feed.pending_shares = None
            source = iter(inner)
        if feed.yields_lists:
            return MatchedBatches(source, feed)
        cutter = BatchDivider(self._place, loader.batch_size)
        return read_everywhere(source, feed.num_groups(), self._place, cutter, loader.drop_last)

    def _is_dispatched(self, loader: DataLoader[Any]) -> bool:
        if self._comm.world.size == 1 or self._options.dispatch_batches is False:
            return False
        if self._options.dispatch_batches:
            return True
        is_stream = isinstance(loader.dataset, IterableDataset)
        return is_stream and self._place.group_size > 1 and not self._divides_itself(loader)

    def _divides_itself(self, loader: DataLoader[Any]) -> bool:
        """Whether the dataset can give each rank files of its own, and may: batches are each worker's."""
        dataset, count = cast(Any, loader.dataset), self._place.count
        if self._place.group_size == 1 or count == 1 or not callable(getattr(dataset, "shard", None)):
            return False
        num_shards = getattr(dataset, "num_shards", None) or getattr(dataset, "n_shards", None)
        return isinstance(num_shards, int) and num_shards >= count

    def _reads_here(self, loader: DataLoader[Any]) -> bool:
        """Whether nothing but sampler, dataset and collate function has a part in a batch of this loader."""
        if isinstance(loader.dataset, IterableDataset | MapDataPipe):
            return False
        plain = self.plain
        is_usual = plain.__iter__ is DataLoader.__iter__ and plain._get_iterator is DataLoader._get_iterator
        return is_usual and not loader.num_workers and not loader.pin_memory

    def _draw_base_seed(self, loader: DataLoader[Any]) -> None:
        """Draw what a plain loader draws to seed its workers, though there are none: later draws are then the same."""
        torch.empty((), dtype=torch.int64).random_(generator=loader.generator)

    def _mover(self, loader: DataLoader[Any]) -> Callable[[Any], Any] | None:
        device = self._device
        if self._place_batch is not None or device_type(device).is_host:
            return self._place_batch
        non_blocking = device_type(device).has_streams and bool(loader.pin_memory)
        return lambda batch: to_device(batch, device, non_blocking)

    def _transfer_for(self, loader: DataLoader[Any]) -> BatchTransfer | None:
        """Return the lane that batches are copied ahead of time on, if they are."""
        wanted = self._options.non_blocking
        if self._lane is not None:
            return None if wanted is False else self._lane
        kind = device_type(self._device)
        if not kind.has_streams or wanted is False:
            return None
        if wanted is None and not (loader.pin_memory and loader.num_workers):
            return None
        if self._side_stream is None:
            self._side_stream = StreamTransfer(self._device, pins=kind.pins_memory and not loader.pin_memory)
        return self._side_stream

    def _build_sampler(self, loader: DataLoader[Any]) -> IndexSampler | None:
        if self._feed is None and not isinstance(loader.dataset, IterableDataset):
            self._feed = IndexSampler(loader, self._place, self._order_seed())
        return self._feed

    def _order_seed(self) -> int | None:
        """Return the seed of the seedable sampler, None if there is none."""
        if not self._options.use_seedable_sampler:
            return None
        if self._seed is None:
            self._seed = int(self._comm.broadcast(torch.tensor(torch.initial_seed() >> 1, dtype=torch.int64), 0))
        return self._seed

    def _updated_inner(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        if self._inner is None:
            self._inner = _plain_twin(loader, self.plain)
            self._inner._iterator = None
        inner = self._inner
        # What may be set on a loader at any time, such as collate_fn, counts from the next iteration on.
        inner.__dict__.update({name: value for name, value in loader.__dict__.items() if not name.startswith("_")})
        feed = self._build_sampler(loader)
        if feed is not None:
            name = "sampler" if loader.batch_sampler is None else "batch_sampler"
            # Out of order, the shares of one step would be of different batches.
            inner.__dict__.update({name: feed, "in_order": True})
        return inner

    def _seed_workers_apart(self, loader: DataLoader[Any], inner: DataLoader[Any]) -> torch.Generator:
        """Return the generator of this share's worker seeds: other seeds than rank 0's, drawn as a plain run draws."""
        if inner._iterator is None:  # persistent workers keep the seed that they started with
            drawn = torch.empty((), dtype=torch.int64).random_(generator=loader.generator).item()
            self._worker_seeds.manual_seed(rng.derive_seed(int(drawn), "loader", self._place.index))
        return self._worker_seeds

    def _num_groups(self, loader: DataLoader[Any], num_batches: int) -> int:
        drop_last = loader.drop_last or bool(getattr(loader.batch_sampler, "drop_last", False))
        return num_groups(num_batches, self._place.group_size, drop_short=self._place.drops_incomplete(drop_last))

    def _expected(self, loader: DataLoader[Any], epoch: EpochProgress) -> int | None:
        """Return how many global batches a stream announces, where it can be believed."""
        # With worker processes the length is a guess, and looking ahead is free.
        if loader.num_workers or (num_samples := length_of(loader.dataset)) is None:
            return None
        size = loader.batch_size or 1
        num_batches = num_samples // size if loader.drop_last else -(-num_samples // size)
        return self._num_groups(loader, max(num_batches - epoch.num_batches, 0))

    def _iterate_stream(self, loader: DataLoader[Any], epoch: EpochProgress) -> Iterator[SharedBatch]:
        comm, place = self._comm, self._place
        inner = self._updated_inner(loader)
        epoch.sampler_state = SamplerState()
        generators = own_generators(loader)
        check_same_loaders(comm, loader.dataset, None, generators)
        if self._divides_itself(loader):
            own = iter(self._divided(loader, inner))
            return read_own_shard(islice(own, epoch.num_batches // place.group_size, None), place)
        with rank_0_random_states(comm, rng.ALL_PARTS, generators):
            source = self._from_position(inner, epoch)  # starts the dataset's iterator, or the workers that do
        if not loader.num_workers and comm.world.size > 1:
            source = self._fetch_in_step(source)
        expected = self._expected(loader, epoch)
        return read_everywhere(source, expected, place, BatchDivider(place, loader.batch_size), loader.drop_last)

    def _from_position(self, inner: DataLoader[Any], epoch: EpochProgress) -> Iterator[Any]:
        """Return a stream's batches from where the epoch goes on: at once where it has a state, else reading on."""
        dataset, resumed = cast(Any, inner.dataset), epoch.resumed
        has_state = is_stateful(dataset) and not inner.num_workers
        if resumed is not None and has_state and resumed.dataset_state is not None:
            dataset.load_state_dict(deepcopy(resumed.dataset_state))
            source = iter(inner)
        else:
            source = islice(iter(inner), epoch.num_batches, None)
        if has_state:
            source = epoch.snapshots = DatasetSnapshots(source, dataset, epoch)
        return source

    def _divided(self, loader: DataLoader[Any], inner: DataLoader[Any]) -> DataLoader[Any]:
        """Return the inner loader over this rank's own part of the dataset."""
        dataset = cast(Any, loader.dataset)
        if inner._iterator is None or not loader.persistent_workers:
            self._own_part = dataset.shard(num_shards=self._place.count, index=self._place.index)
        inner.__dict__["dataset"] = self._own_part
        return inner

    def _dispatch(self, loader: DataLoader[Any], epoch: EpochProgress) -> Iterator[SharedBatch]:
        place = self._place
        feed = self._build_sampler(loader)
        epoch.sampler_state = SamplerState()

        def steps(indices: Sequence[int]) -> Iterator[list[SharedBatch]]:
            # Rank 0 alone: an epoch of the plain loader, in the order of the seedable sampler if there is one.
            inner = self._updated_inner(loader)
            if feed is not None:
                name = "sampler" if loader.batch_sampler is None else "batch_sampler"
                inner.__dict__[name] = DrawnIndices(feed)
            cutter = BatchDivider(place, loader.batch_size or getattr(loader.batch_sampler, "batch_size", None))
            drop_short = place.drops_incomplete(
                loader.drop_last or bool(getattr(loader.batch_sampler, "drop_last", False))
            )
            expected = self._expected(loader, epoch) if feed is None else feed.num_groups()
            source = self._from_position(inner, epoch) if feed is None else self._started(inner, epoch)
            for group, is_last in flag_last(grouped(source, place.group_size, drop_short=drop_short), expected):
                pairs = cutter.divide(group, is_last, indices)
                group.clear()
                yield pairs

        return receive_dispatched(place, steps, self._device)

    def _started(self, inner: DataLoader[Any], epoch: EpochProgress) -> Iterator[Any]:
        is_new = epoch.resumed is None or not epoch.resumed.is_within_epoch
        with nullcontext() if is_new else rng.fork_rng(parts=("torch",)):
            return iter(inner)

    def _fetch_in_step(self, source: Iterator[Any]) -> Iterator[Any]:
        # The stream draws in this process, from the generators that the model draws from as well.
        while True:
            with rank_0_random_states(self._comm, rng.ALL_PARTS, []):
                batch = next(source, _END)
            if batch is _END:
                return
            yield batch


class SkippedBatchesLoader:
    """A prepared loader without its first batches; everything else is the loader's."""

    def __init__(self, loader: DataLoader[Any], num_batches: int) -> None:
        self._loader = loader
        self._num_batches = num_batches

    def __iter__(self) -> Iterator[Any]:
        return _sharding(self._loader).iterate(self._loader, self._num_batches)

    def __len__(self) -> int:
        return max(len(self._loader) - self._num_batches, 0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class _LoaderIterator(Iterator[Any]):
    """What a loop over a sharded loader gets: each batch on the device, announced just before."""

    __slots__ = ("_epoch", "_move", "_pairs", "_sharding")

    def __init__(
        self,
        pairs: Iterator[SharedBatch],
        sharding: _ShardedLoading,
        epoch: EpochProgress,
        move: Callable[[Any], Any] | None,
    ) -> None:
        self._pairs = pairs
        self._sharding = sharding
        self._epoch = epoch
        self._move = move

    def __next__(self) -> Any:
        sharding = self._sharding
        observer = sharding.observer
        observer.on_batch_end()
        try:
            batch, share = next(self._pairs)
        except StopIteration:
            sharding.end_epoch(self._epoch)
            observer.on_share(None)
            raise
        sharding.latest = share
        self._epoch.record_batch(share)
        observer.on_share(share)
        if self._move is not None:
            batch = self._move(batch)
        if sharding.on_batch is not None:
            sharding.on_batch(batch, share)
        return batch


class _WholeIterator(Iterator[Any]):
    """The iterator of a loader that is read whole; an observer may keep a weak reference to see whether it lives."""

    __slots__ = ("__weakref__", "_move", "_observer", "_source")

    def __init__(self, source: Iterator[Any], observer: LoaderObserver, move: Callable[[Any], Any] | None) -> None:
        self._source = source
        self._observer = observer
        self._move = move

    def __next__(self) -> Any:
        try:
            batch = next(self._source)
        except StopIteration:
            self._observer.on_whole_batch(None, None)
            raise
        self._observer.on_whole_batch(self, first_batch_size(batch))
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
