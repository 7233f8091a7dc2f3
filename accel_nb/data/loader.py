"""Sharding of a ``DataLoader`` in place: the object stays the same, and each rank reads its share.

There are two ways to read a share:

- *by index*: the loader has a batch sampler. Only the samples of this rank are read. This process reads them. With
  worker processes, or if the loader's class defines ``__iter__``, an inner loader reads them; it differs from the
  loader in its batch sampler only. Whole batches of such a class are read by its own ``__iter__``.
- *by batch*: the dataset is a stream or yields complete batches (``batch_size=None``); see `accel_nb.data.streams`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import torch
from torch.utils.data import DataLoader, IterableDataset, MapDataPipe

from accel_nb.config.sections import DataOptions
from accel_nb.data.computed_attribute import ComputedAttribute
from accel_nb.data.custom_iteration import CustomIteration
from accel_nb.data.dispatch import receive_dispatched
from accel_nb.data.fetch import build_reader
from accel_nb.data.index_batches import DrawnIndices, FetchedBatches, MatchedBatches
from accel_nb.data.index_distribution import (
    DataShard,
    IndexSampler,
    ReadMode,
    check_same_loaders,
    length_of,
    own_generators,
    rank_0_random_states,
)
from accel_nb.data.loader_checks import refuse_divided
from accel_nb.data.loader_iterator import LoaderIterator
from accel_nb.data.loader_observer import LoaderObserver
from accel_nb.data.order import BatchShare, flag_last, grouped, num_global_batches
from accel_nb.data.persistent_workers import iterate_in_turn
from accel_nb.data.position import (
    DatasetSnapshots,
    EpochProgress,
    LoaderPosition,
    SamplerState,
    capture_sampler_state,
    is_stateful,
    restore_sampler_state,
)
from accel_nb.data.prefetch import BatchAndShare, BatchPrefetcher, BatchTransfer, StreamTransfer
from accel_nb.data.sampler import set_epoch
from accel_nb.data.streams import BatchDivider, read_everywhere, read_own_shard
from accel_nb.data.whole_iterator import WholeIterator
from accel_nb.errors import MisuseError
from accel_nb.runtime import rng
from accel_nb.runtime.devices.registry import device_type
from accel_nb.runtime.process.user_code import warn_at_user_line
from accel_nb.runtime.tensors.instance_patching import make_instance_class
from accel_nb.runtime.tensors.nested import to_device

if TYPE_CHECKING:
    from accel_nb.runtime.distributed.communicator import Communicator

T = TypeVar("T")
BatchSizeMeaning = Literal["global", "per-worker"]


_ATTRIBUTE = "_accel_nb_sharding"
_END = object()


def shard_loader(
    loader: DataLoader[T],
    *,
    comm: Communicator,
    batch: BatchSizeMeaning,
    device: torch.device | str,
    observer: LoaderObserver,
    coords: tuple[int, int] | None = None,
    options: DataOptions | None = None,
    seed: int | None = None,
    transfer: BatchTransfer | None = None,
    place_batch: Callable[[Any], Any] | None = None,
) -> DataLoader[T]:
    """Make ``loader`` yield this rank's share of each global batch, on ``device``; return the same object.

    ``batch="global"``: each batch of the loader is divided among the ranks, and ``len`` is unchanged. ``"per-worker"``:
    as many consecutive batches as there are shares form a global batch, one for each, and ``len`` shrinks accordingly.

    - ``observer`` decides which loops train, and receives the events of all loops. A batch counts as trained on when
      `LoaderObserver.num_trained` has grown by one since the batch was yielded, or when the next one is requested.
    - ``coords`` is the index of the share of the data that this rank reads, and the number of shares; by default rank
      and world size. Ranks with the same coordinates read the same share.
    - ``options`` is the section of the configuration about loaders; ``seed`` is the default of its ``data_seed``, for
      the order of ``use_seedable_sampler``. ``transfer`` replaces the prefetch of batches to the device.
    - ``place_batch`` moves a batch to the device, in place of a copy to ``device``, and returns it.
    - Every rank must iterate the loader, in the same order among its loaders. Each epoch costs an all_gather at the
      first batch. Generators of the loader, a sampler class not defined by torch, and a stream that is read or
      dispatched in this process cost further messages.
    - A stream that every rank reads must yield the same samples on every rank: do not split it by rank. Splits among
      worker processes with ``get_worker_info`` are not changed.
    - Batches come in the order of the sampler, for each value of ``in_order``.
    - The loader gains ``set_epoch``, ``total_batch_size``, ``total_dataset_length``, ``end_of_dataloader`` and
      ``remainder``.
    - Sharding a sharded loader replaces the settings. Copying or pickling it returns a plain loader.

    Raises :class:`MisuseError` for objects other than a ``DataLoader``, and for a loader that is divided already.
    """
    if not isinstance(loader, DataLoader):
        raise MisuseError(f"only a torch DataLoader can be sharded, not a {type(loader).__name__}")
    unshard_loader(loader)
    if comm.world.size > 1:
        refuse_divided(loader)
    plain = type(loader)
    options = options or DataOptions()
    index, count = coords or (comm.world.rank, comm.world.size)
    shard = DataShard(comm, index, count, count if batch == "per-worker" else 1, options.even_batches)
    sharding = _ShardedLoading(plain, shard, torch.device(device), observer, options, seed, transfer, place_batch)
    setattr(loader, _ATTRIBUTE, sharding)
    loader.__class__ = _sharded_class(plain, has_own_length=batch == "per-worker")
    return loader


def unshard_loader(loader: DataLoader[T]) -> DataLoader[T]:
    """Undo :func:`shard_loader`; do nothing for a plain loader. Iterations in progress continue unchanged."""
    if is_sharded(loader):
        loader.__class__ = _sharding(loader).plain
        delattr(loader, _ATTRIBUTE)
    return loader


def is_sharded(loader: object) -> bool:
    """Return whether :func:`shard_loader` has changed this object."""
    return _ATTRIBUTE in getattr(loader, "__dict__", ())


def count_remaining(loader: DataLoader[Any], position: LoaderPosition) -> int | None:
    """Return the number of samples in the epoch after ``position``, None if the length is not known."""
    return _sharding(loader).count_remaining(loader, position)


def watch_batches(loader: DataLoader[Any], on_batch: Callable[[Any, BatchShare], object] | None) -> None:
    """Call ``on_batch`` with each batch that a sharded loader yields, and its share; None removes it."""
    _sharding(loader).on_batch = on_batch


def read_mode(loader: DataLoader[Any]) -> ReadMode:
    """Return the `ReadMode` of a sharded loader, which applies to iterations in progress too."""
    return _sharding(loader).shard.mode


def latest_share(loader: DataLoader[Any]) -> BatchShare | None:
    """Return the share of the batch that a sharded loader has yielded last; None before the first one."""
    return _sharding(loader).latest


def set_even_batches(loader: DataLoader[Any], is_on: bool) -> bool:
    """Set the option ``even_batches`` of a sharded loader for its next iterations; return the previous value."""
    return _sharding(loader).set_even(is_on)


def has_custom_iteration(loader: DataLoader[Any]) -> bool:
    """Return whether a loader's class defines its iteration, which may not follow the sampler."""
    plain = _sharding(loader).plain if is_sharded(loader) else type(loader)
    return plain.__iter__ is not DataLoader.__iter__


def reset_epochs(loader: DataLoader[Any]) -> None:
    """Restart a sharded loader's epoch counter at 0."""
    _sharding(loader).reset_epochs()


def get_position(loader: DataLoader[Any], *, includes_latest: bool = False) -> LoaderPosition:
    """Return the position of a sharded loader; only rank 0's is complete, and is to be stored.

    It follows the batches that were trained on; with ``includes_latest`` it follows the batch that was yielded last.
    """
    return _sharding(loader).position(loader, includes_latest)


def resume_loader(
    loader: DataLoader[Any],
    position: LoaderPosition,
    *,
    passes: bool = False,
    on_resume: Callable[[], object] | None = None,
) -> None:
    """Make a sharded loader's next iteration resume at ``position``; every rank must call.

    With ``passes`` the loader's next iterations, one for each finished epoch, yield no batches. ``on_resume`` is called
    when the iteration after them starts. Check `explain_no_resume` before the call.
    """
    _sharding(loader).resume(loader, position, passes, on_resume)


def explain_no_resume(loader: DataLoader[Any], position: LoaderPosition) -> str | None:
    """Return why a sharded loader cannot resume at ``position``, such as a stream without a state; None if it can."""
    return _sharding(loader).explain_no_resume(loader, position)


def skip_first_batches(dataloader: DataLoader[T], num_batches: int = 0) -> SkippedBatchesLoader:
    """Return an iterable over a prepared loader without this rank's first batches, which training loops do not read.

    Not needed after `Accelerator.load_state`, which resumes prepared loaders. Every rank must call.
    Raises `MisuseError` for a loader that is not prepared, and for an invalid number of batches.
    """
    if not is_sharded(dataloader):
        raise MisuseError("skip_first_batches takes a loader that is prepared: call prepare(loader) first")
    if not isinstance(num_batches, int) or num_batches < 0:
        raise MisuseError(f"skip_first_batches got {num_batches!r} batches; it takes a whole number of at least 0")
    return SkippedBatchesLoader(dataloader, num_batches)


def _sharding(loader: DataLoader[Any]) -> _ShardedLoading:
    return loader.__dict__[_ATTRIBUTE]


def _sharded_class(plain: type[DataLoader[Any]], *, has_own_length: bool) -> type[DataLoader[Any]]:
    """Return a subclass for one instance, with the name of ``plain``; copies of the instance are of class ``plain``."""

    def __iter__(self: DataLoader[Any]) -> Iterator[Any]:
        return _sharding(self).iterate(self)

    def __len__(self: DataLoader[Any]) -> int:
        return _sharding(self).length(self)

    def __reduce_ex__(self: DataLoader[Any], protocol: Any) -> Any:
        # Protocol 1 passes the class as an argument; later protocols require the class of the pickled object.
        return _plain_copy(self, plain).__reduce_ex__(1)

    body: dict[str, Any] = {"__iter__": __iter__, "__reduce_ex__": __reduce_ex__}
    if has_own_length:
        body["__len__"] = __len__
    attributes = {
        "set_epoch": lambda self, epoch: _sharding(self).set_epoch(self, epoch),
        "total_batch_size": ComputedAttribute(lambda self: _sharding(self).total_batch_size(self)),
        "total_dataset_length": ComputedAttribute(lambda self: len(self.dataset)),
        "end_of_dataloader": ComputedAttribute(lambda self: _sharding(self).is_at_end),
        "remainder": ComputedAttribute(lambda self: _sharding(self).remainder(self)),
    }
    body.update({name: value for name, value in attributes.items() if name == "set_epoch" or not hasattr(plain, name)})
    return make_instance_class(plain, plain, body)


def _plain_copy(loader: DataLoader[Any], plain: type[DataLoader[Any]]) -> DataLoader[Any]:
    # Copy __dict__, since a DataLoader raises if most attributes are set after its construction.
    copied = object.__new__(plain)
    copied.__dict__.update({name: value for name, value in loader.__dict__.items() if name != _ATTRIBUTE})
    return copied


class _ShardedLoading:
    """The settings and readers of a sharded loader, stored in an attribute of it."""

    def __init__(
        self,
        plain: type[DataLoader[Any]],
        shard: DataShard,
        device: torch.device,
        observer: LoaderObserver,
        options: DataOptions,
        seed: int | None,
        transfer: BatchTransfer | None,
        place_batch: Callable[[Any], Any] | None,
    ) -> None:
        self.plain = plain
        self.observer = observer
        self.on_batch: Callable[[Any, BatchShare], object] | None = None
        # The share of the batch yielded last; None before the first batch of an iteration.
        self.latest: BatchShare | None = None
        self.shard = shard
        self._comm = shard.comm
        self._device = device
        self._options = options
        self._seed = seed if options.data_seed is None else options.data_seed
        # Ranks are seeded separately once a loader is divided, so the seed is read before.
        self._initial_seed = torch.initial_seed() % 2**63
        self._transfer = transfer
        self._side_stream: StreamTransfer | None = None
        # Reused in all epochs, so that persistent workers stay alive.
        self._inner: DataLoader[Any] | None = None
        self._index_sampler: IndexSampler | None = None
        self._worker_seeds = torch.Generator()
        # The part for this rank of a dataset that has a method ``shard``.
        self._dataset_shard: Any = None
        self._place_batch = place_batch
        self._num_epochs = 0
        self._epoch: EpochProgress | None = None
        # The next iterations: the number of empty ones, then the position at which to resume.
        self._num_empty = 0
        self._resumed: LoaderPosition | None = None
        self._on_resume: Callable[[], object] | None = None

    def length(self, loader: DataLoader[Any]) -> int:
        num_batches = self.plain.__len__(loader)
        return self._num_global_batches(loader, num_batches) if self.observer.is_training() else num_batches

    def total_batch_size(self, loader: DataLoader[Any]) -> int | None:
        size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
        return None if size is None else size * self.shard.batches_per_global_batch

    @property
    def is_at_end(self) -> bool:
        return self.latest is not None and self.latest.is_last

    def remainder(self, loader: DataLoader[Any]) -> int:
        """Return the number of samples in an incomplete last global batch without repeats, else 0; -1 if unknown."""
        total, length = self.total_batch_size(loader), length_of(loader.dataset)
        return -1 if not total or length is None or loader.drop_last else length % total

    def set_even(self, is_even: bool) -> bool:
        """Set whether the next iterations divide samples equally, with repeats; return the previous value."""
        was_even = self.shard.is_even
        self.shard = replace(self.shard, is_even=is_even)
        if self._index_sampler is not None:
            self._index_sampler.set_even(is_even)
        return was_even

    def set_epoch(self, loader: DataLoader[Any], epoch: int) -> None:
        index_sampler, sampler = self._build_sampler(loader), loader.batch_sampler
        if hasattr(self.plain, "set_epoch"):
            self.plain.set_epoch(loader, epoch)  # pyright: ignore[reportAttributeAccessIssue]
        else:
            set_epoch(epoch, sampler, getattr(sampler, "sampler", None), loader.sampler, loader.dataset)
        set_epoch(epoch, *(() if index_sampler is None else index_sampler.replacements))
        if self._inner is not None and self._inner.dataset is not loader.dataset:
            set_epoch(epoch, self._inner.dataset)

    def iterate(self, loader: DataLoader[Any], skipped: int | None = None) -> Iterator[Any]:
        move = self._mover(loader)
        if not self.observer.on_epoch_start(loader):
            self.observer.on_loop_start(loader)
            whole = self._iterate_whole(loader, move)
            return whole if skipped is None else islice(whole, skipped, None)
        self.end_epoch(self._epoch)
        self.observer.on_loop_start(loader)
        if self._num_empty:
            self._num_empty -= 1
            self._num_epochs += 1
            if self.shard.mode.on_end is not None:
                self.shard.mode.on_end()
            return iter(())
        on_resume, self._on_resume = self._on_resume, None
        if on_resume is not None:
            on_resume()
        resumed, self._resumed = self._resumed, None
        if skipped is not None:
            resumed = self._position_after(loader, skipped, resumed)
        self.latest = None
        self._epoch = epoch = EpochProgress(self.shard.batches_per_global_batch, self.observer.num_trained, resumed)
        pairs = self._pairs(loader, epoch)
        transfer = self._transfer_for(loader)
        if transfer is None:
            return LoaderIterator(loader, pairs, self, epoch, move)
        return LoaderIterator(loader, BatchPrefetcher(pairs, transfer), self, epoch, None)

    def end_epoch(self, epoch: EpochProgress | None) -> None:
        """Count an epoch once: when it is read to its end, or when another one starts."""
        if epoch is not None and not epoch.is_over:
            epoch.is_over = True
            self._num_epochs += 1

    def reset_epochs(self) -> None:
        """Restart the count of epochs, and drop the empty iterations left from an earlier resume."""
        self._num_epochs = self._num_empty = 0
        self._on_resume = None
        self._epoch = None

    def position(self, loader: DataLoader[Any], includes_latest: bool) -> LoaderPosition:
        epoch = self._epoch
        if self._resumed is not None:  # set by `resume`, and not iterated since
            return self._resumed
        here = LoaderPosition(self._num_epochs + self._num_empty, seed=self._seed, num_parts=self.shard.count)
        if epoch is not None and not epoch.is_over and epoch.sampler_state is not None:
            seen, batches = epoch.count_trained(includes_latest=includes_latest)
            stream = None if epoch.snapshots is None else epoch.snapshots.state_after(batches)
            return replace(
                here,
                num_samples=seen,
                num_batches=batches,
                sampler_state=epoch.sampler_state,
                dataset_state=stream,
                is_within_epoch=True,
            )
        index_sampler = self._build_sampler(loader)
        return (
            here
            if index_sampler is None
            else replace(here, sampler_state=capture_sampler_state(index_sampler.sampler, own_generators(loader)))
        )

    def resume(
        self, loader: DataLoader[Any], position: LoaderPosition, passes: bool, on_resume: Callable[[], object] | None
    ) -> None:
        self._epoch = None
        self._num_epochs, self._num_empty = (0, position.num_epochs) if passes else (position.num_epochs, 0)
        self._resumed = position if position.is_within_epoch else None
        self._on_resume = on_resume
        if self._options.use_seedable_sampler and position.seed is not None and position.seed != self._seed:
            self._seed, self._index_sampler = position.seed, None
        index_sampler = self._build_sampler(loader)
        # Also within an epoch, whose start restores it again: the sampler's length may be that of the epoch.
        if index_sampler is not None and position.sampler_state is not None:
            restore_sampler_state(position.sampler_state, index_sampler.sampler, own_generators(loader))

    def count_remaining(self, loader: DataLoader[Any], position: LoaderPosition) -> int | None:
        index_sampler, sampler = self._build_sampler(loader), loader.batch_sampler
        inner: Any = getattr(sampler, "sampler", None)
        total = length_of(loader.dataset) if index_sampler is None or inner is None else length_of(inner)
        if total is None:
            return None
        if loader.drop_last and loader.batch_size:
            total -= total % loader.batch_size
        return max(total - position.num_samples, 0)

    def explain_no_resume(self, loader: DataLoader[Any], position: LoaderPosition) -> str | None:
        """Return why the loader cannot resume at a position, None if it can."""
        num_generators, drawing = len(own_generators(loader)), position.sampler_state
        is_stream = isinstance(loader.dataset, IterableDataset)
        if drawing is not None and not is_stream and num_generators != len(drawing.generators):
            return (
                f"the loader has {num_generators} generators of its own, and had {len(drawing.generators)} when the "
                "checkpoint was saved: pass as many, to its sampler or as generator="
            )
        if not is_stream or not position.num_batches:
            return None
        name = type(loader.dataset).__name__
        if self._can_shard_dataset(loader) and not self._is_dispatched(loader):
            if position.num_parts != self.shard.count:
                return (
                    f"the dataset {name} divides its files among ranks, and was saved by {position.num_parts} ranks in "
                    "the middle of an epoch: continue with as many, or save between epochs"
                )
        elif position.dataset_state is not None and is_stateful(loader.dataset) and not loader.num_workers:
            return None
        if self._options.resume_stream == "replay":
            return None
        return (
            f"the stream {name} cannot resume after {position.num_samples} samples: add the methods state_dict and "
            "load_state_dict and read it without worker processes, or set data.resume_stream to replay, which reads "
            "these samples again without training on them"
        )

    def _position_after(
        self, loader: DataLoader[Any], num_batches: int, resumed: LoaderPosition | None
    ) -> LoaderPosition:
        """Return the position after ``num_batches`` of each rank, in the resumed epoch or a new one."""
        batches = num_batches * self.shard.batches_per_global_batch
        seen = batches * (loader.batch_size or getattr(loader.batch_sampler, "batch_size", None) or 1)
        if resumed is None:
            return LoaderPosition(self._num_epochs, seen, batches)
        if resumed.num_batches != batches:
            warn_at_user_line(
                f"skip_first_batches({num_batches}) goes to batch {batches} of the loader, and the checkpoint that was "
                f"loaded is at batch {resumed.num_batches}: leave skip_first_batches out, as a prepared loader "
                "continues by itself"
            )
        return replace(resumed, num_samples=seen, num_batches=batches, dataset_state=None)

    def _iterate_whole(self, loader: DataLoader[Any], move: Callable[[Any], Any] | None) -> Iterator[Any]:
        if loader.batch_sampler is not None and self._reads_in_process(loader):
            indices = iter(loader.batch_sampler)
            self._draw_base_seed(loader)
            source = map(build_reader(loader), indices)
        else:
            source = iterate_in_turn(loader, self._inner, self.plain.__iter__)
        return WholeIterator(loader, source, self.observer, move)

    def _pairs(self, loader: DataLoader[Any], epoch: EpochProgress) -> Iterator[BatchAndShare]:
        """Start an epoch; return an iterator over pairs of this rank's batch and its share of the global batch."""
        index_sampler = self._build_sampler(loader)
        if index_sampler is not None:
            index_sampler.epoch = epoch
            index_sampler.generators = own_generators(loader)
            index_sampler.after_start = None
        if self._is_dispatched(loader):
            return self._dispatch(loader, epoch)
        if index_sampler is None:
            return self._iterate_stream(loader, epoch)
        is_new = epoch.resumed is None or not epoch.resumed.is_within_epoch
        if self.shard.mode.is_whole and is_new and has_custom_iteration(loader):
            return self._iterate_own_class(loader, epoch, index_sampler)
        if index_sampler.yields_lists and self._reads_in_process(loader):
            if index_sampler.draws_at_start and epoch.resumed is None:
                index_sampler.after_start = lambda: self._draw_base_seed(loader)
            elif is_new:
                self._draw_base_seed(loader)
            return FetchedBatches(index_sampler, loader)
        inner = self._updated_inner(loader)
        # A resumed epoch drew the seed of its workers before it was saved: do not advance the generator again.
        with nullcontext() if is_new else rng.fork_rng(parts=("torch",)):
            if self.shard.index > 0 and not self.shard.mode.is_whole:
                inner.generator = self._worker_seed_generator(loader, inner)
            index_sampler.pending_shares = None
            source = iterate_in_turn(inner, loader if self.shard.mode.is_whole else None, iter)
        if index_sampler.yields_lists:
            return MatchedBatches(source, index_sampler)
        divider = BatchDivider(self.shard, loader.batch_size)
        return read_everywhere(source, index_sampler.num_global_batches(), self.shard, divider, loader.drop_last)

    def _iterate_own_class(
        self, loader: DataLoader[Any], epoch: EpochProgress, index_sampler: IndexSampler
    ) -> Iterator[BatchAndShare]:
        """Read whole batches by the ``__iter__`` of the loader's class, such as one that repeats its data forever."""
        check_same_loaders(self._comm, loader.dataset, None, index_sampler.generators)
        epoch.sampler_state = index_sampler.capture_state()
        divider, num_batches = BatchDivider(self.shard, loader.batch_size), index_sampler.num_global_batches()
        # Possibly the loader itself, whose `iter` would come here again.
        return CustomIteration(self.plain.__iter__(loader), divider, num_batches, self.shard.index)

    def _is_dispatched(self, loader: DataLoader[Any]) -> bool:
        if self._comm.world.size == 1 or self._options.dispatch_batches is False:
            return False
        if self._options.dispatch_batches:
            return True
        is_stream = isinstance(loader.dataset, IterableDataset)
        return is_stream and self.shard.batches_per_global_batch > 1 and not self._can_shard_dataset(loader)

    def _can_shard_dataset(self, loader: DataLoader[Any]) -> bool:
        """Return whether to divide the dataset by its method ``shard``; only for batches that are each worker's."""
        dataset, count = cast(Any, loader.dataset), self.shard.count
        if self.shard.batches_per_global_batch == 1 or count == 1 or not callable(getattr(dataset, "shard", None)):
            return False
        num_shards = getattr(dataset, "num_shards", None) or getattr(dataset, "n_shards", None)
        return isinstance(num_shards, int) and num_shards >= count

    def _reads_in_process(self, loader: DataLoader[Any]) -> bool:
        """Return whether batches need only sampler, dataset and collate function, so this process can read them."""
        if isinstance(loader.dataset, IterableDataset | MapDataPipe):
            return False
        plain = self.plain
        uses_torch_iter = plain.__iter__ is DataLoader.__iter__ and plain._get_iterator is DataLoader._get_iterator
        return uses_torch_iter and not loader.num_workers and not loader.pin_memory

    def _draw_base_seed(self, loader: DataLoader[Any]) -> None:
        """Draw the base seed that a plain loader draws even without workers, so that later random numbers are equal."""
        torch.empty((), dtype=torch.int64).random_(generator=loader.generator)

    def _mover(self, loader: DataLoader[Any]) -> Callable[[Any], Any] | None:
        device = self._device
        if self._place_batch is not None or device_type(device).is_host:
            return self._place_batch
        non_blocking = device_type(device).has_streams and bool(loader.pin_memory)
        return lambda batch: to_device(batch, device, non_blocking)

    def _transfer_for(self, loader: DataLoader[Any]) -> BatchTransfer | None:
        """Return the transfer that prefetches batches to the device, None without prefetch."""
        prefetches = self._options.non_blocking
        if self._transfer is not None:
            return None if prefetches is False else self._transfer
        kind = device_type(self._device)
        if not kind.has_streams or prefetches is False:
            return None
        if prefetches is None and not (loader.pin_memory and loader.num_workers):
            return None
        if self._side_stream is None:
            self._side_stream = StreamTransfer(self._device, pins=kind.pins_memory and not loader.pin_memory)
        return self._side_stream

    def _build_sampler(self, loader: DataLoader[Any]) -> IndexSampler | None:
        if self._index_sampler is None and not isinstance(loader.dataset, IterableDataset):
            self._index_sampler = IndexSampler(loader, self.shard, self._order_seed())
        return self._index_sampler

    def _order_seed(self) -> int | None:
        """Return the seed of the seedable sampler, None if there is none."""
        if not self._options.use_seedable_sampler:
            return None
        if self._seed is None:
            self._seed = int(self._comm.broadcast(torch.tensor(self._initial_seed, dtype=torch.int64, device="cpu"), 0))
        return self._seed

    def _updated_inner(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        if self._inner is None:
            self._inner = _plain_copy(loader, self.plain)
            self._inner._iterator = None
        inner = self._inner
        # Attributes that may be set at any time, such as collate_fn, take effect at the next iteration.
        inner.__dict__.update({name: value for name, value in loader.__dict__.items() if not name.startswith("_")})
        index_sampler = self._build_sampler(loader)
        if index_sampler is not None:
            name = "sampler" if loader.batch_sampler is None else "batch_sampler"
            # Without order, the shares of one step would belong to different batches.
            inner.__dict__.update({name: index_sampler, "in_order": True})
        return inner

    def _worker_seed_generator(self, loader: DataLoader[Any], inner: DataLoader[Any]) -> torch.Generator:
        """Return the generator of this share's worker seeds, derived from the seed that a plain loader draws."""
        if inner._iterator is None:  # persistent workers keep their initial seed
            drawn = torch.empty((), dtype=torch.int64).random_(generator=loader.generator).item()
            self._worker_seeds.manual_seed(rng.derive_seed(int(drawn), "loader", self.shard.index))
        return self._worker_seeds

    def _num_global_batches(self, loader: DataLoader[Any], num_batches: int) -> int:
        drops_short = self.shard.drops_incomplete_of(loader)
        return num_global_batches(num_batches, self.shard.batches_per_global_batch, drop_short=drops_short)

    def _expected(self, loader: DataLoader[Any], epoch: EpochProgress) -> int | None:
        """Return the number of remaining global batches of a stream by its length, None if that is not reliable."""
        # With worker processes the length is an estimate, and reading one batch ahead costs nothing.
        if loader.num_workers or (num_samples := length_of(loader.dataset)) is None:
            return None
        size = loader.batch_size or 1
        num_batches = num_samples // size if loader.drop_last else -(-num_samples // size)
        return self._num_global_batches(loader, max(num_batches - epoch.num_batches, 0))

    def _iterate_stream(self, loader: DataLoader[Any], epoch: EpochProgress) -> Iterator[BatchAndShare]:
        comm, shard = self._comm, self.shard
        inner = self._updated_inner(loader)
        epoch.sampler_state = SamplerState()
        generators = own_generators(loader)
        check_same_loaders(comm, loader.dataset, None, generators)
        if self._can_shard_dataset(loader):
            own = iter(self._loader_over_own_shard(loader, inner))
            return read_own_shard(islice(own, epoch.num_batches // shard.batches_per_global_batch, None), shard)
        with rank_0_random_states(comm, rng.ALL_PARTS, generators):
            source = self._from_position(inner, epoch)  # starts the dataset's iterator, or the workers that do
        if not loader.num_workers and comm.world.size > 1:
            source = self._fetch_in_step(source)
        expected = self._expected(loader, epoch)
        return read_everywhere(source, expected, shard, BatchDivider(shard, loader.batch_size), loader.drop_last)

    def _from_position(self, inner: DataLoader[Any], epoch: EpochProgress) -> Iterator[Any]:
        """Return a stream's batches from where the epoch resumes: load its state, or read and drop earlier batches."""
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

    def _loader_over_own_shard(self, loader: DataLoader[Any], inner: DataLoader[Any]) -> DataLoader[Any]:
        """Return the inner loader over this rank's shard of the dataset."""
        dataset = cast(Any, loader.dataset)
        if inner._iterator is None or not loader.persistent_workers:
            self._dataset_shard = dataset.shard(num_shards=self.shard.count, index=self.shard.index)
        inner.__dict__["dataset"] = self._dataset_shard
        return inner

    def _dispatch(self, loader: DataLoader[Any], epoch: EpochProgress) -> Iterator[BatchAndShare]:
        shard = self.shard
        index_sampler = self._build_sampler(loader)
        epoch.sampler_state = SamplerState()

        def steps(indices: Sequence[int]) -> Iterator[list[BatchAndShare]]:
            # On rank 0 only: an epoch of the plain loader, in the order of the seedable sampler if there is one.
            inner = self._updated_inner(loader)
            if index_sampler is not None:
                name = "sampler" if loader.batch_sampler is None else "batch_sampler"
                inner.__dict__[name] = DrawnIndices(index_sampler)
            size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
            divider = BatchDivider(shard, size, fills_batches=False)  # as accelerate repeats samples here
            expected = self._expected(loader, epoch) if index_sampler is None else index_sampler.num_global_batches()
            source = self._from_position(inner, epoch) if index_sampler is None else self._start_iteration(inner, epoch)
            groups = grouped(source, shard.batches_per_global_batch, drop_short=shard.drops_incomplete_of(loader))
            for group, is_last in flag_last(groups, expected):
                pairs = divider.divide(group, is_last, indices)
                group.clear()
                yield pairs

        return receive_dispatched(shard, steps, self._device)

    def _start_iteration(self, inner: DataLoader[Any], epoch: EpochProgress) -> Iterator[Any]:
        is_new = epoch.resumed is None or not epoch.resumed.is_within_epoch
        with nullcontext() if is_new else rng.fork_rng(parts=("torch",)):
            return iter(inner)

    def _fetch_in_step(self, source: Iterator[Any]) -> Iterator[Any]:
        # The stream draws random numbers in this process, from the same generators as the model.
        while True:
            with rank_0_random_states(self._comm, rng.ALL_PARTS, []):
                batch = next(source, _END)
            if batch is _END:
                return
            yield batch


class SkippedBatchesLoader:
    """A prepared loader without its first batches; other attributes are the loader's."""

    def __init__(self, loader: DataLoader[Any], num_batches: int) -> None:
        self._loader = loader
        self._num_batches = num_batches

    def __iter__(self) -> Iterator[Any]:
        return _sharding(self._loader).iterate(self._loader, self._num_batches)

    def __len__(self) -> int:
        return max(len(self._loader) - self._num_batches, 0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
