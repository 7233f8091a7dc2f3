"""Small tensors go through memory that the ranks share: values, sums to the bit, and every way in which a wait ends."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from accel_nb.runtime.distributed import process_group
from accel_nb.runtime.distributed.communicator import TorchComm
from accel_nb.runtime.distributed.memory_exchange import MAX_BYTES, MemoryExchange, is_supported
from accel_nb.runtime.distributed.process_group import DefaultGroup
from accel_nb.runtime.world import World
from tests.ranks.launch import run_ranks

pytestmark = pytest.mark.skipif(not is_supported(2), reason="this processor or system has no such exchange")

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64)


def opened(world: World, folder: str, *, has_exchange: bool = True) -> TorchComm:
    """Open a group of the test's own instead of the launcher's."""
    dist.destroy_process_group()
    with patch.object(process_group, "is_supported", lambda num_ranks: has_exchange):
        group = DefaultGroup.open(world, f"{folder}/{has_exchange}", timeout_s=60)
    assert (DefaultGroup.exchange() is not None) == has_exchange
    return TorchComm(world, group)


def exchange() -> MemoryExchange:
    found = DefaultGroup.exchange()
    assert found is not None
    return found


def many_shapes(world: World, folder: str) -> int:
    comm, draws, own = opened(world, folder), random.Random(0), random.Random(world.rank)
    for number in range(400):
        shape = [draws.randrange(5) for _ in range(draws.randrange(4))]
        dtype, source = draws.choice(DTYPES), draws.randrange(world.size)
        ours = [torch.full(shape, rank + number % 3).to(dtype) for rank in range(world.size)]
        sum(range(own.randrange(20_000)))  # ranks come in any order
        gathered = comm.all_gather(ours[world.rank])
        assert all(torch.equal(one, other) for one, other in zip(gathered, ours, strict=True))
        assert torch.equal(comm.broadcast(ours[world.rank].clone(), source), ours[source])
    return exchange().num_exchanges


@pytest.mark.parametrize("size", [2, 3])
def test_every_rank_gets_the_tensors_of_all(tmp_path, size):
    assert run_ranks(many_shapes, size, str(tmp_path)) == [800] * size


def sums(world: World, folder: str, has_exchange: bool) -> list[list[float]]:
    comm, generator = opened(world, folder, has_exchange=has_exchange), torch.Generator().manual_seed(world.rank)
    found = []
    for numel in (0, 1, 1000, MAX_BYTES // 8, MAX_BYTES // 4 + 1):
        for dtype in (torch.float32, torch.bfloat16):
            values = torch.randn(numel, generator=generator).to(dtype)
            found += [comm.all_reduce(values.clone(), op).double() for op in ("sum", "mean", "max", "min")]
    return [[float(value.sum()), *map(float, value[:5])] for value in found]


@pytest.mark.parametrize("size", [2, 3])
def test_sums_are_equal_to_the_bit_in_memory_and_over_sockets(tmp_path, size):
    first, *others = run_ranks(sums, size, str(tmp_path), True)
    assert others == [first] * (size - 1)
    assert run_ranks(sums, size, str(tmp_path), False)[0] == first


def changed_in_place(world: World, folder: str) -> list[bool]:
    comm = opened(world, folder)
    weight = nn.Parameter(torch.full((2,), float(world.rank)))
    before, changed = weight._version, []
    for call in (lambda: comm.all_reduce(weight), lambda: comm.broadcast(weight, 1)):
        call()
        changed.append(weight._version > before)
        before = weight._version
    assert weight.tolist() == [1.0, 1.0]
    part = torch.zeros(2, 3).t()  # not contiguous
    comm.broadcast(part if world.rank else part.fill_(5.0))
    return [*changed, bool((part == 5.0).all())]


def test_a_change_in_place_is_one_for_torch_too(tmp_path):
    assert run_ranks(changed_in_place, 2, str(tmp_path)) == [[True, True, True], [True, False, True]]


def differ(world: World, folder: str) -> list[str]:
    comm, said = opened(world, folder), []
    tensor = torch.ones(2 + world.rank)
    for call in (lambda: comm.all_gather(tensor), lambda: comm.all_gather(tensor[:2]) or comm):
        try:
            call()
        except RuntimeError as error:
            said.append(str(error))
    return said


def test_different_calls_are_an_error_and_the_next_ones_are_right(tmp_path):
    first, second = run_ranks(differ, 2, str(tmp_path))
    assert len(first) == len(second) == 1
    assert "rank 0 is in all_gather with 8 bytes, and rank 1 in another exchange with 12 bytes" in first[0]


def raised_by(wait: Callable[[], object]) -> str:
    try:
        wait()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def interrupted(world: World, folder: str, how: str) -> str:
    comm = opened(world, folder)
    store = dist.FileStore(f"{folder}/notes", 2)
    if world.rank == 1:
        store.get("rank 0 waits")
        if how == "leave":
            exchange().leave()
        else:
            store.get("rank 0 has stopped")
        return "left"

    def act_when_waiting() -> None:
        while not exchange().last.is_open:
            time.sleep(0.001)  # the wait is in C, where nothing can announce it
        store.set("rank 0 waits", "1")
        if how == "signal":
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        elif how == "cut":
            comm.group.shut_down_connections()

    thread = threading.Thread(target=act_when_waiting)
    thread.start()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    began = time.monotonic()
    said = raised_by(lambda: comm.all_gather(torch.ones(1)))
    assert time.monotonic() - began < 20
    thread.join()
    store.set("rank 0 has stopped", "1")
    return said


@pytest.mark.parametrize(
    ("how", "said"),
    [("leave", "RuntimeError: the exchange"), ("cut", "RuntimeError: the exchange"), ("signal", "KeyboardInterrupt")],
)
def test_a_wait_can_be_ended(tmp_path, how, said):
    assert run_ranks(interrupted, 2, str(tmp_path), how)[0].startswith(said)


def waits_for_a_dead_rank(world: World, folder: str) -> str:
    comm = opened(world, folder)
    read, write = os.pipe()
    if os.fork() == 0:  # the rank is a child, since the test's launcher waits for every rank that it has started
        os.close(read)
        exchange()._words[exchange()._line + 5] = os.getpid()
        comm.all_gather(torch.ones(1))
        if world.rank == 0:
            os.write(write, raised_by(lambda: comm.all_gather(torch.ones(1))).encode())
        os._exit(0)
    os.close(write)
    said = os.read(read, 1000).decode()
    os.wait()
    dist.barrier()  # a rank that returns closes the group, which ends the wait too
    return said


def test_a_rank_that_has_ended_is_named(tmp_path):
    assert "rank 1 has ended" in run_ranks(waits_for_a_dead_rank, 2, str(tmp_path))[0]


def no_memory(size: int) -> tuple[int, str, bytes]:
    raise OSError("too many open files")


def memory_elsewhere(size: int) -> tuple[int, str, bytes]:
    return os.open(os.devnull, os.O_RDONLY), "/nowhere", b""


def cannot_open(world: World, folder: str, how: str) -> float:
    with patch.object(process_group, "create_memory", globals()[how]):
        dist.destroy_process_group()
        group = DefaultGroup.open(world, f"{folder}/store", timeout_s=60)
    assert DefaultGroup.exchange() is None
    return float(TorchComm(world, group).all_reduce(torch.ones(1)))


@pytest.mark.parametrize("how", ["no_memory", "memory_elsewhere"])
def test_torch_sends_what_ranks_without_common_memory_exchange(tmp_path, how):
    assert run_ranks(cannot_open, 2, str(tmp_path), how) == [2.0, 2.0]


def opened_in_part(world: World, folder: str) -> list[str]:
    dist.destroy_process_group()

    def fail(*args: object) -> None:
        raise RuntimeError("a rank has ended")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist.distributed_c10d, "all_reduce", fail)
        assert "has ended" in raised_by(lambda: DefaultGroup.open(world, f"{folder}/first", timeout_s=20))
    paths = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return [path for path in paths if os.path.exists(path) and "accel_nb_exchange" in os.readlink(path)]


def test_a_group_that_is_not_opened_leaves_no_descriptor(tmp_path):
    assert run_ranks(opened_in_part, 2, str(tmp_path)) == [[], []]


def waits_without_pidfd(world: World, folder: str) -> bool:
    opened(world, folder)
    if world.rank == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.delattr(os, "pidfd_open")
            return exchange()._has_ended(1)
    return False


def test_a_python_without_pidfd_waits_for_ranks(tmp_path):
    assert run_ranks(waits_without_pidfd, 2, str(tmp_path)) == [False, False]


def reopened(world: World, folder: str) -> list[int]:
    comm = opened(world, folder)
    comm.all_gather(torch.ones(1))
    counts = [exchange().num_exchanges]
    before = DefaultGroup.num_collectives()
    comm.all_gather(torch.ones(1))
    counts.append((DefaultGroup.num_collectives() or 0) - (before or 0))
    comm.group.reopen(f"{folder}/second")
    comm.all_gather(torch.ones(1))
    return [*counts, exchange().num_exchanges]


def test_a_group_that_is_opened_again_has_new_memory(tmp_path):
    assert run_ranks(reopened, 2, str(tmp_path)) == [[1, 1, 1]] * 2


def position(world: World, folder: str) -> list[object]:
    comm = opened(world, folder)
    dist.all_reduce(torch.ones(1))
    first = comm.group.last_collective()
    assert first is not None
    has_records = first.operation != "none"  # older versions of torch record no collectives of gloo
    comm.all_gather(torch.ones(2, 3))
    last = comm.group.last_collective()
    dist.all_reduce(torch.ones(1))
    after = comm.group.last_collective()
    assert last is not None
    assert after is not None
    assert after.sequence == last.sequence + has_records
    return [last.operation, last.sizes, last.is_open, last.includes_all_ranks, last.group == after.group]


def test_the_last_collective_may_be_an_exchange(tmp_path):
    assert run_ranks(position, 2, str(tmp_path)) == [["all_gather", [[2, 3]], False, True, True]] * 2
