"""The loader classes of accelerate, for libraries that construct or divide loaders themselves.

A loader that `Accelerator.prepare` has prepared keeps its class; ``isinstance`` is true for it as well.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence, Sized
from importlib import import_module
from itertools import islice
from typing import Any, cast

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from accel_nb.accelerator.prepare.preparer import is_prepared
from accel_nb.accelerator.process.operations import send_to_device
from accel_nb.accelerator.process.seeding import synchronize_rng_states
from accel_nb.compat.data.batch_shards import BatchSamplerShard, IterableDatasetShard, set_epoch_of
from accel_nb.compat.data.dispatched_loaders import dispatch_loader
from accel_nb.compat.data.epochs import LoaderWithoutFirstBatches
from accel_nb.compat.states import GradientState
from accel_nb.data.loader import is_sharded
from accel_nb.data.loader import skip_first_batches as skip_of_prepared
from accel_nb.errors import MisuseError
from accel_nb.runtime.distributed.current_world import current_comm, current_world

_LOADER_OPTIONS = (
    "batch_size", "shuffle", "sampler", "num_workers", "collate_fn", "pin_memory", "drop_last", "timeout",
    "worker_init_fn", "multiprocessing_context", "generator", "prefetch_factor", "persistent_workers",
    "pin_memory_device",
)  # fmt: skip
_DEVICE_OPTIONS = ("device", "rng_types", "synchronized_generator", "_drop_last", "_non_blocking")


class _AcceptsPreparedMeta(type):
    """Metaclass whose ``isinstance`` is true for prepared loaders too."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return type.__instancecheck__(cls, instance) or (
            cls in (DataLoaderShard, DataLoaderDispatcher, DataLoaderStateMixin)
            and isinstance(instance, DataLoader)
            and (is_prepared(instance) or is_sharded(instance))
        )


class DataLoaderStateMixin(metaclass=_AcceptsPreparedMeta):
    """The state of a loader's iteration: whether the batch is the last one, and how many samples the last one has."""

    end_of_dataloader = False
    remainder = -1
    _drop_last = False

    def reset(self) -> None:
        """Reset the state of the previous iteration."""
        self.end_of_dataloader, self.remainder = False, -1

    def begin(self) -> None:
        """Begin an iteration."""
        self.reset()
        GradientState()._add_dataloader(self)

    def end(self) -> None:
        """End an iteration."""
        GradientState()._remove_dataloader(self)


class SeedableRandomSampler(RandomSampler):
    """A `RandomSampler` whose order depends on its seed and the epoch only: the generator is seeded with their sum."""

    def __init__(self, *args: Any, data_seed: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.initial_seed = data_seed if data_seed is not None else torch.random.initial_seed()
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        if self.generator is None:
            self.generator = torch.Generator()
        self.generator.manual_seed(self.epoch + self.initial_seed)
        yield from super().__iter__()
        self.set_epoch(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self.epoch = epoch


class SkipBatchSampler(BatchSampler):
    """A batch sampler without its first batches."""

    def __init__(self, batch_sampler: Any, skip_batches: int = 0) -> None:
        self.batch_sampler, self.skip_batches = batch_sampler, skip_batches
        self.sampler, self.drop_last = (
            getattr(batch_sampler, "sampler", None),
            getattr(batch_sampler, "drop_last", False),
        )

    @property
    def batch_size(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The batch size of the sampler."""
        return getattr(self.batch_sampler, "batch_size", None)

    @property
    def total_length(self) -> int:
        """The number of all batches, including the skipped ones."""
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[list[int]]:
        return islice(iter(self.batch_sampler), self.skip_batches, None)

    def __len__(self) -> int:
        return len(self.batch_sampler) - self.skip_batches

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch to the sampler."""
        set_epoch_of(self.batch_sampler, epoch)


class _DeviceLoader(DataLoader[Any]):
    """A loader that moves batches to a device, skips the first ones, and reads one ahead to detect the last."""

    def __init__(
        self,
        dataset: Any,
        device: torch.device | str | int | None = None,
        rng_types: Sequence[Any] | None = None,
        synchronized_generator: torch.Generator | None = None,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        torch_device_mesh: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, **kwargs)
        self.gradient_state = GradientState()
        self.device, self.rng_types, self.synchronized_generator = device, rng_types, synchronized_generator
        self.skip_batches, self.use_stateful_dataloader = skip_batches, use_stateful_dataloader
        self._drop_last, self._non_blocking, self.iteration = _drop_last, _non_blocking, 0

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Create an object of a class that inherits from torchdata's too if ``use_stateful_dataloader`` is set."""
        return super().__new__(_with_state(cls) if kwargs.get("use_stateful_dataloader") else cls)

    def _record_state(self) -> None:
        """Do nothing: this loader has no state to save."""

    @property
    def total_batch_size(self) -> int:
        """The number of samples of one batch on all processes together; 0 if a batch sampler has no one size."""
        sampler, dataset = self._batches, cast(Any, self.dataset)
        if isinstance(sampler, BatchSamplerShard) or isinstance(dataset, IterableDatasetShard):
            shard = sampler if isinstance(sampler, BatchSamplerShard) else dataset
            return (shard.batch_size or 0) * (1 if shard.split_batches else shard.num_processes)
        return getattr(sampler, "batch_size", None) or self.batch_size or 1

    @property
    def _batches(self) -> Any:
        """The sampler of batches, which is the sampler itself if the dataset is read by batches."""
        return self.sampler if self.batch_sampler is None else self.batch_sampler

    @property
    def total_dataset_length(self) -> int:
        """The number of samples of the dataset."""
        return getattr(self.dataset, "total_length", 0) or len(cast(Any, self.dataset))

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the samplers and the dataset."""
        self.iteration = epoch
        set_epoch_of(self._batches, epoch)
        set_epoch_of(self.dataset, epoch)

    def get_sampler(self) -> Any:
        """Return the sampler of indices."""
        return get_sampler(self)

    def set_sampler(self, sampler: Any) -> None:
        """Replace the sampler of indices."""
        holder: Any = self.batch_sampler
        if hasattr(holder, "batch_sampler"):
            holder = holder.batch_sampler
        holder.sampler = sampler

    def __iter__(self) -> Any:
        if self.rng_types is not None:
            kinds = [str(getattr(kind, "value", kind)) for kind in self.rng_types]
            if self.synchronized_generator is None:
                kinds = [kind for kind in kinds if kind != "generator"]
            synchronize_rng_states(kinds, self.synchronized_generator)
        state: Any = self if isinstance(self, DataLoaderStateMixin) else None
        self.set_epoch(self.iteration)
        if state is None:
            yield from self._read(None)
            return
        state.begin()
        has_length = isinstance(self.dataset, Sized) and not isinstance(self.dataset, IterableDataset)
        if has_length and self.total_batch_size and not self._drop_last:
            state.remainder = len(cast(Any, self.dataset)) % self.total_batch_size
        try:
            yield from self._read(state)
        finally:  # also after a loop that is left early
            state.end()

    def _read(self, state: Any) -> Iterator[Any]:
        batches = islice(super().__iter__(), self.skip_batches, None)
        batch = next(batches, _END)
        while batch is not _END:
            self._record_state()
            following = next(batches, _END)
            if state is not None and following is _END:
                state.end_of_dataloader = True
            yield batch if self.device is None else send_to_device(batch, self.device, self._non_blocking)
            batch = following
        self._record_state()
        self.iteration += 1


_END = object()


@functools.cache
def _with_state(kind: Any) -> Any:
    """Return a subclass of a loader class and of torchdata's; its state is that after the batch it yielded last."""

    class WithState(kind, stateful_class()):
        _yielded: Any = None

        def _record_state(self) -> None:
            self._yielded = super().state_dict()

        def state_dict(self) -> dict[str, Any]:
            return super().state_dict() if self._yielded is None else self._yielded

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self._yielded = None
            super().load_state_dict(state_dict)

    WithState.__name__, WithState.__qualname__, WithState.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    return WithState


def stateful_class() -> Any:
    """Return torchdata's loader class; raise ImportError if the package is missing."""
    try:
        return import_module("torchdata.stateful_dataloader").StatefulDataLoader
    except ImportError:
        raise ImportError("use_stateful_dataloader=True needs torchdata: pip install torchdata") from None


def stateful_copy(dataloader: DataLoader[Any]) -> DataLoader[Any]:
    """Return a loader of torchdata's class with the dataset and the options of another."""
    return _plain_copy(dataloader, stateful_class())


def _plain_copy(dataloader: DataLoader[Any], kind: Any = DataLoader) -> DataLoader[Any]:
    """Return a loader of the class ``kind`` with the dataset and the options of another."""
    options = _copy_options(dataloader)
    if dataloader.batch_sampler is not None and not isinstance(dataloader.dataset, IterableDataset):
        for name in ("batch_size", "shuffle", "sampler", "drop_last"):
            options.pop(name, None)
        options["batch_sampler"] = dataloader.batch_sampler
    return kind(dataloader.dataset, **options)


class DataLoaderAdapter(metaclass=_AcceptsPreparedMeta):
    """The common base of the loaders of this module, for ``isinstance``."""


class _Meta(_AcceptsPreparedMeta, type(DataLoader)):
    """The metaclass of the loaders below."""


class DataLoaderShard(DataLoaderAdapter, DataLoaderStateMixin, _DeviceLoader, metaclass=_Meta):
    """A loader of this process's batches, which it moves to the device."""

    def __init__(self, dataset: Any, *args: Any, **kwargs: Any) -> None:
        _DeviceLoader.__init__(self, dataset, *args, **kwargs)
        self.base_dataloader = self


class DataLoaderDispatcher(DataLoaderAdapter, DataLoaderStateMixin, _DeviceLoader, metaclass=_Meta):
    """A loader that one process reads for all processes; here for a single process only."""

    def __init__(
        self,
        dataset: Any,
        split_batches: bool = False,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        slice_fn: Callable[..., Any] | None = None,
        torch_device_mesh: Any = None,
        **kwargs: Any,
    ) -> None:
        if current_world().size > 1:
            raise MisuseError(
                "DataLoaderDispatcher is not built for several processes: Accelerator.prepare(loader) with "
                "dispatch_batches=True reads on the first process and divides"
            )
        _DeviceLoader.__init__(
            self,
            dataset,
            skip_batches=skip_batches,
            use_stateful_dataloader=use_stateful_dataloader,
            _drop_last=_drop_last,
            _non_blocking=_non_blocking,
            **kwargs,
        )
        self.split_batches, self.base_dataloader = split_batches, self


class SkipDataLoader(DataLoaderAdapter, DataLoaderStateMixin, _DeviceLoader, metaclass=_Meta):
    """A loader without its first batches."""

    def __init__(
        self, dataset: Any, skip_batches: int = 0, use_stateful_dataloader: bool = False, **kwargs: Any
    ) -> None:
        _DeviceLoader.__init__(
            self, dataset, skip_batches=skip_batches, use_stateful_dataloader=use_stateful_dataloader, **kwargs
        )
        self.base_dataloader = self

    def __len__(self) -> int:
        return super().__len__() - self.skip_batches


def get_sampler(dataloader: Any) -> Any:
    """Return a loader's sampler of indices."""
    holder = dataloader.batch_sampler if dataloader.sampler is None else dataloader
    while hasattr(holder, "batch_sampler") and getattr(holder, "sampler", None) is None:
        holder = holder.batch_sampler
    found = getattr(holder, "sampler", None)
    return getattr(dataloader.batch_sampler, "sampler", found)


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """Return a loader without its first batches, which are not read; see `accel_nb.skip_first_batches`."""
    if is_sharded(dataloader):
        skip_of_prepared(dataloader, num_batches)  # checks the number
        return LoaderWithoutFirstBatches(dataloader, num_batches)
    options = _copy_options(dataloader)
    if isinstance(dataloader, _DeviceLoader):
        num_batches += dataloader.skip_batches
        options |= {name: getattr(dataloader, name) for name in _DEVICE_OPTIONS}
    if isinstance(dataloader.dataset, IterableDataset) or dataloader.batch_sampler is None:
        made = SkipDataLoader(dataloader.dataset, skip_batches=num_batches, **options)
    else:
        sampler = SkipBatchSampler(dataloader.batch_sampler, num_batches)
        for name in ("batch_size", "shuffle", "sampler", "drop_last"):
            options.pop(name, None)
        kind = type(dataloader) if isinstance(dataloader, _DeviceLoader) else DataLoader
        made = kind(dataloader.dataset, batch_sampler=sampler, **options)
    if hasattr(dataloader, "iteration"):
        cast(Any, made).iteration = dataloader.iteration
    return made


def _copy_options(dataloader: DataLoader[Any]) -> dict[str, Any]:
    found = {name: getattr(dataloader, name) for name in _LOADER_OPTIONS if hasattr(dataloader, name)}
    if dataloader.num_workers == 0:
        found.pop("prefetch_factor", None)
        found.pop("timeout", None)
    if isinstance(dataloader.dataset, IterableDataset):
        found.pop("sampler", None)
    if not found.get("pin_memory_device"):
        found.pop("pin_memory_device", None)
    if found.get("batch_size") is None:
        found.pop("drop_last", None)
    return found


def prepare_data_loader(
    dataloader: DataLoader[Any],
    device: torch.device | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: Sequence[Any] | None = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: Callable[..., Any] | None = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    torch_device_mesh: Any = None,
) -> DataLoader[Any]:
    """Return a loader of one process's share, as accelerate divides; `Accelerator.prepare` divides exactly.

    With ``dispatch_batches`` the first process reads for all; `MisuseError` for a function that cuts its batches. Every
    process must call: all draw the same random order.
    """
    world = current_world()
    count = world.size if num_processes is None else num_processes
    index = world.rank if process_index is None else process_index
    if dispatch_batches and not put_on_device:
        raise ValueError("dispatch_batches=True moves batches to the device of each process: pass put_on_device=True")
    if dispatch_batches and slice_fn_for_dispatch is not None:
        raise MisuseError("slice_fn_for_dispatch has no effect: batches are cut along their first dim; leave it out")
    if split_batches and dataloader.batch_size is not None and dataloader.batch_size % count:
        raise ValueError(
            f"split_batches=True divides each batch among {count} processes: its batch_size, which is "
            f"{dataloader.batch_size}, must be a multiple of that"
        )
    options = _copy_options(dataloader)
    options |= {
        "device": device if put_on_device else None,
        "rng_types": rng_types,
        "_non_blocking": non_blocking,
        "_drop_last": dataloader.drop_last,
        "use_stateful_dataloader": use_stateful_dataloader,
    }
    if dispatch_batches and world.size > 1:
        return dispatch_loader(
            _plain_copy(dataloader),
            device,
            split_batches=split_batches,
            even_batches=even_batches,
            use_seedable_sampler=use_seedable_sampler,
            data_seed=data_seed,
            non_blocking=non_blocking,
        )
    dataset: Any = dataloader.dataset
    if isinstance(dataset, IterableDataset):
        return _shard_iterable(dataset, dataloader, options, count, index, split_batches)
    batch_sampler = _batch_sampler_with_common_order(dataloader, count, use_seedable_sampler, data_seed)
    if count > 1:
        generator = getattr(getattr(batch_sampler, "sampler", None), "generator", None)
        options["synchronized_generator"] = generator if isinstance(generator, torch.Generator) else None
        batch_sampler = BatchSamplerShard(batch_sampler, count, index, split_batches, even_batches)
    if batch_sampler is None:
        return DataLoaderShard(dataset, **options)
    for name in ("batch_size", "shuffle", "sampler", "drop_last"):
        options.pop(name, None)
    if dataloader.batch_sampler is None:  # the dataset is read by batches
        return DataLoaderShard(dataset, sampler=batch_sampler, batch_size=None, **options)
    return DataLoaderShard(dataset, batch_sampler=batch_sampler, **options)


def _batch_sampler_with_common_order(
    dataloader: DataLoader[Any], count: int, use_seedable_sampler: bool, data_seed: int | None
) -> Any:
    """Return a loader's sampler of batches, whose random order is the same on all processes; None if it has none."""
    is_read_by_batches = dataloader.batch_sampler is None and isinstance(dataloader.sampler, BatchSampler)
    batches = cast(Any, dataloader.sampler if is_read_by_batches else dataloader.batch_sampler)
    if batches is None:
        if count == 1:
            return None
        raise MisuseError(
            "a loader with batch_size=None has no batches to divide: give it a batch_size, or a BatchSampler as sampler"
        )
    sampler: Any = getattr(batches, "sampler", None)  # a batch sampler of the user's may have none
    if type(sampler) is not RandomSampler:
        return batches
    if use_seedable_sampler:
        seed = _seed_of_rank_0(torch.random.initial_seed(), count) if data_seed is None else data_seed
        batches.sampler = SeedableRandomSampler(
            sampler.data_source, sampler.replacement, sampler._num_samples, sampler.generator, data_seed=seed
        )
    elif count > 1 and sampler.generator is None:
        seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_().item())
        sampler.generator = torch.Generator().manual_seed(_seed_of_rank_0(seed, count))
    return batches


def _seed_of_rank_0(seed: int, count: int) -> int:
    """Return rank 0's seed, if the data is divided among all ranks."""
    return current_comm().broadcast_json(seed) if count == current_world().size else seed


def _shard_iterable(
    dataset: Any, dataloader: DataLoader[Any], options: dict[str, Any], count: int, index: int, split_batches: bool
) -> DataLoader[Any]:
    num_shards: int = getattr(dataset, "n_shards", 0)
    if count > 1 and num_shards and num_shards % count == 0 and hasattr(dataset, "shard") and not split_batches:
        return DataLoaderShard(dataset.shard(num_shards=count, index=index), **options)
    if count > 1:
        size = dataloader.batch_size or 1
        dataset = IterableDatasetShard(dataset, size, dataloader.drop_last, count, index, split_batches)
        if split_batches and dataloader.batch_size is not None:
            options["batch_size"] = size // count
    return DataLoaderShard(dataset, **options)
