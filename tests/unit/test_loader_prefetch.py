"""Batches that are copied to the device ahead of time."""

import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    IterableDataset,
)

from accel_nb.config.sections import DataOptions
from accel_nb.data import prefetch
from accel_nb.data.order import BatchShare
from accel_nb.runtime import rng
from accel_nb.runtime.distributed.communicator import LocalComm
from tests.support.nightly import nightly
from tests.support.thread_ranks import (
    LOADERS,
    Setup,
    Squares,
    flat,
    numbers,
    run_threads,
)


class RecordingTransfer:
    """Copies nothing, and remembers when it was asked."""

    def __init__(self, log):
        self.log = log

    def start(self, batch):
        self.log.append(("start", flat(batch)))
        return ("handle", batch)

    def finish(self, handle):
        kind, batch = handle
        assert kind == "handle"
        self.log.append(("finish", flat(batch)))
        return batch


class FakeStream:
    """A stream that records the events that it gets."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def record_event(self):
        self.log.append(f"record on {self.name}")
        return self.name

    def wait_event(self, event):
        self.log.append(f"{self.name} waits for {event}")


class FakeType:
    """A type of device with streams."""

    def __init__(self, log):
        self.current, self.side = FakeStream("current", log), FakeStream("side", log)

    def new_stream(self, device):
        return self.side

    def current_stream(self, device):
        return self.current

    def on_stream(self, stream):
        return nullcontext()


def test_a_copy_waits_for_what_reads_the_memory_that_it_may_reuse(monkeypatch):
    class Graph:
        """An object that moves itself, and whose tensors nothing else finds."""

        def to(self, device, non_blocking):
            log.append("copy")
            return self

    log = []
    kind = FakeType(log)
    monkeypatch.setattr(prefetch, "device_type", lambda device: kind)
    transfer = prefetch.StreamTransfer(torch.device("cpu"), pins=False)

    transfer.finish(transfer.start(Graph()))

    assert log == ["record on current", "side waits for current", "copy", "record on side", "current waits for side"]


def test_the_next_batch_is_copied_while_one_is_trained_on():
    log = []
    setup = Setup(LocalComm(), transfer=RecordingTransfer(log))
    for batch in setup.shard(DataLoader(numbers(5), batch_size=2)):
        log.append(("train", flat(batch), setup.shares[-1]))  # noqa: PERF401

    assert log == [
        ("start", [0, 1]),
        ("start", [2, 3]),
        ("finish", [0, 1]),
        ("train", [0, 1], BatchShare(2, 2, False, False)),
        ("start", [4]),
        ("finish", [2, 3]),
        ("train", [2, 3], BatchShare(2, 2, False, False)),
        ("finish", [4]),
        ("train", [4], BatchShare(1, 1, True, False)),
    ]
    assert setup.shares[-1] is None


@pytest.mark.parametrize("name", LOADERS)
def test_copies_ahead_change_nothing_in_what_is_read(name):
    def body(comm, transfer):
        rng.set_seed(11, per_rank=comm.world)
        setup = Setup(comm, transfer=transfer)
        return setup.read(setup.shard(LOADERS[name]()))

    assert run_threads(2, lambda comm: body(comm, RecordingTransfer([]))) == run_threads(
        2, lambda comm: body(comm, None)
    )


def test_non_blocking_off_copies_nothing_ahead():
    log = []
    setup = Setup(LocalComm(), transfer=RecordingTransfer(log), options=DataOptions(non_blocking=False))
    setup.read(setup.shard(DataLoader(numbers(5), batch_size=2)))

    assert log == []


def test_an_error_of_a_prefetched_batch_is_raised_when_that_batch_is_requested():
    class Holed(Squares):
        def __getitem__(self, index):
            if index == 2:
                raise KeyError(index)
            return super().__getitem__(index)

    setup = Setup(LocalComm(), transfer=RecordingTransfer([]))
    batches, seen = iter(setup.shard(DataLoader(Holed(6), batch_size=2))), []
    while True:
        try:
            seen.append((flat(next(batches)), setup.shares[-1].is_last))
        except KeyError:
            seen.append("lost")
        except StopIteration:
            break

    assert seen == [([0, 1], False), "lost", ([4, 5], True)]


@pytest.mark.parametrize("num_samples", [None, nightly(8)])
def test_no_batch_lives_longer_than_it_is_needed(num_samples):
    """A stream is read one batch ahead at most, and a batch that the loop has dropped is gone."""
    alive = weakref.WeakSet()

    class Batch(torch.Tensor):
        pass

    def made(number):
        batch = torch.full((4,), number).as_subclass(Batch)
        alive.add(batch)
        return batch

    class Batches(IterableDataset):
        def __iter__(self):
            for number in range(8):
                yield made(number)

    if num_samples is not None:
        Batches.__len__ = lambda self: num_samples
    setup = Setup(LocalComm())
    counts = []
    batches = iter(setup.shard(DataLoader(Batches(), batch_size=None)))
    for _ in range(7):
        batch = next(batches)
        del batch
        gc.collect()
        counts.append(len(alive))

    assert max(counts) <= (1 if num_samples is None else 0)
