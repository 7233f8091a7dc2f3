"""A blocked collective can be cut from another thread, and the group opened again with all Python state kept."""

from __future__ import annotations

import gc
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

from accel_nb.errors import MisuseError
from accel_nb.runtime.distributed.communicator import TorchComm
from accel_nb.runtime.distributed.process_group import DefaultGroup
from accel_nb.runtime.distributed.shared_group import share_default_group
from accel_nb.runtime.world import World
from tests.ranks.launch import RankError, run_ranks


def fresh_group(world: World, folder: str) -> DefaultGroup:
    """Open a group of the test's own instead of the launcher's."""
    dist.destroy_process_group()
    return DefaultGroup.open(world, f"{folder}/first", timeout_s=60)


def freed_after_its_group(world: World, folder: str) -> bool:
    group = fresh_group(world, folder)
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    group.close()  # gloo's threads are letting go of the gradients' all_reduce, for which they take Python's lock
    del model  # its reducer frees the group, and joins the threads, without letting go of the lock
    gc.collect()
    return True


def blocked_until_cut(world: World, folder: str, where: str) -> dict[str, Any]:
    group = fresh_group(world, folder)
    subgroup = dist.new_group([0, 1]) if where == "subgroup" else None
    kept = torch.ones(3) * world.rank
    facts: dict[str, Any] = {"raised": False, "cut": 0}
    store = dist.FileStore(f"{folder}/notes", 2)
    if world.rank == 0:
        entered = threading.Event()

        def cut_when_blocked() -> None:
            entered.wait()
            store.get("peer is elsewhere")  # blocks until the other rank says that it will not come
            facts["cut"] = group.shut_down_connections()
            facts["time"] = time.perf_counter()

        monitor = threading.Thread(target=cut_when_blocked)
        monitor.start()
        try:
            entered.set()
            dist.all_reduce(torch.ones(1), group=subgroup)
        except RuntimeError:
            facts["raised"] = True
            facts["delay_s"] = time.perf_counter() - facts.get("time", time.perf_counter())
        monitor.join()
        store.set("cut", "1")
    else:
        store.set("peer is elsewhere", "1")
        store.get("cut")
    group.reopen(f"{folder}/second")
    comm = TorchComm(world, group)
    facts["sum"] = comm.all_reduce(kept).tolist()
    group.close()
    return facts


def test_a_model_may_outlive_its_group(tmp_path: Path):
    for number in range(5):
        (tmp_path / str(number)).mkdir()
        assert run_ranks(freed_after_its_group, 2, str(tmp_path / str(number)), timeout_s=30) == [True, True]


@pytest.mark.parametrize("where", ["default group", "subgroup"])
def test_blocked_rank_comes_back_when_the_group_is_cut(tmp_path: Path, where: str) -> None:
    first, second = run_ranks(blocked_until_cut, 2, str(tmp_path), where)
    assert first["raised"]
    assert first["cut"] > 0
    assert first["delay_s"] < 1
    assert first["sum"] == second["sum"] == [1.0, 1.0, 1.0]


def abandoned_collective(world: World, folder: str) -> list[float]:
    """Close a group whose collective never ends, since no connection is shut down."""
    group = fresh_group(world, folder)
    store = dist.FileStore(f"{folder}/notes", 2)
    if world.rank == 0:
        work = dist.all_reduce(torch.ones(3), async_op=True)
        group._sockets.clear()
        group.close()
        store.set("closed", "1")
        assert work is not None
        assert not work.is_completed()
    else:
        store.get("closed")
        group.close()
    group.reopen(f"{folder}/second")
    total = TorchComm(world, group).all_reduce(torch.ones(2)).tolist()
    group.close()
    return total


def test_a_group_is_reopened_although_a_collective_never_ends(tmp_path: Path) -> None:
    assert run_ranks(abandoned_collective, 2, str(tmp_path), timeout_s=45) == [[2.0, 2.0]] * 2


def cut_in_backward(world: World, folder: str) -> dict[str, Any]:
    from accel_nb.accelerator import Accelerator

    group = fresh_group(world, folder)
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerator = Accelerator(comm=TorchComm(world, group))
    accelerator.prepare(model, optimizer)
    store = dist.FileStore(f"{folder}/notes", 2)
    facts: dict[str, Any] = {}
    if world.rank == 0:
        loss = model(torch.ones(2, 3)).sum()
        cutter = threading.Thread(target=lambda: (store.get("elsewhere"), group.shut_down_connections()))
        cutter.start()
        try:
            accelerator.backward(loss)
        except RuntimeError as error:
            facts["raised"] = type(error).__name__
        cutter.join()
        store.set("cut", "1")
    else:
        store.set("elsewhere", "1")
        store.get("cut")
    accelerator.close()
    group.reopen(f"{folder}/second")
    accelerator = Accelerator(comm=TorchComm(world, group))
    accelerator.prepare(model, optimizer)
    optimizer.zero_grad()
    for _ in range(3):
        accelerator.backward(model(torch.full((2, 3), float(world.rank))).sum())
        optimizer.step()
        optimizer.zero_grad()
    accelerator.close()
    group.close()
    facts["weight"] = model.weight.tolist()
    return facts


def test_training_goes_on_after_a_cut_in_the_middle_of_backward(tmp_path: Path) -> None:
    first, second = run_ranks(cut_in_backward, 2, str(tmp_path))
    assert "raised" in first
    assert first["weight"] == second["weight"]


def cut_spares_others(world: World, folder: str) -> bool:
    import socket

    group = fresh_group(world, folder)
    server = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(server.getsockname())
    peer, _ = server.accept()
    dist.barrier()
    group.shut_down_connections()
    client.sendall(b"alive")
    alive = peer.recv(5) == b"alive"
    for connection in (client, peer, server):
        connection.close()
    group.close()
    return alive


def test_cut_leaves_other_connections_alone(tmp_path: Path) -> None:
    assert run_ranks(cut_spares_others, 2, str(tmp_path)) == [True, True]


def timeout_after_a_replacement(world: World, folder: str) -> float:
    """Replace the default group by way of an object that stands for it, as after memory ran out on one rank."""
    group = fresh_group(world, folder)
    DefaultGroup.adopt(world).replace_default_group()
    TorchComm(world, group).barrier()
    opened: Any = dist.group.WORLD
    timeout = opened._get_backend(torch.device("cpu")).options._timeout
    group.close()
    return timeout.total_seconds()


def test_a_group_that_replaces_another_has_its_timeout(tmp_path: Path) -> None:
    assert run_ranks(timeout_after_a_replacement, 2, str(tmp_path)) == [60.0] * 2


def timeouts_of_a_shared_group(world: World, folder: str) -> list[float]:
    group = fresh_group(world, folder)
    share_default_group(60)
    dist.init_process_group("gloo", timeout=timedelta(seconds=3))
    found = [group._timeout_of_open_group().total_seconds()]
    dist.destroy_process_group()
    return [*found, group._timeout_of_open_group().total_seconds()]


def test_a_timeout_that_code_sets_ends_with_its_group(tmp_path: Path) -> None:
    assert run_ranks(timeouts_of_a_shared_group, 2, str(tmp_path)) == [[3, 60]] * 2


def talk(world: World) -> dict[str, Any]:
    comm = TorchComm(world, DefaultGroup.adopt(world))
    rank = float(world.rank)
    facts = {
        "sum": comm.all_reduce(torch.tensor([rank, 1.0])).tolist(),
        "mean": comm.all_reduce(torch.tensor([rank]), "mean").tolist(),
        "max": comm.all_reduce(torch.tensor([rank]), "max").tolist(),
        "min": comm.all_reduce(torch.tensor([rank]), "min").tolist(),
        "strided": comm.all_reduce(torch.arange(6.0).reshape(2, 3).t()).tolist(),
        "gather": [part.tolist() for part in comm.all_gather(torch.tensor([world.rank]))],
        "scatter": comm.reduce_scatter(torch.arange(6.0)).tolist(),
        "broadcast": comm.broadcast(torch.tensor([rank]), 2).tolist(),
        "json": comm.all_gather_json({"rank": world.rank, "text": "x" * world.rank}),
        "said": comm.broadcast_json(["from", world.rank], 1),
    }
    comm.barrier()
    with pytest.raises(MisuseError):  # on every rank, whichever caused it
        comm.all_gather_json(object() if world.rank == 1 else 1)
    with pytest.raises(MisuseError, match="product"):
        comm.all_reduce(torch.ones(1), cast(Any, "product"))
    return facts


def test_communicator_over_three_ranks() -> None:
    for rank, facts in enumerate(run_ranks(talk, 3)):
        assert facts["sum"] == [3.0, 3.0]
        assert facts["mean"] == [1.0]
        assert facts["max"] == [2.0]
        assert facts["min"] == [0.0]
        assert facts["strided"] == [[0.0, 9.0], [3.0, 12.0], [6.0, 15.0]]
        assert facts["gather"] == [[0], [1], [2]]
        assert facts["scatter"] == [3.0 * (2 * rank), 3.0 * (2 * rank + 1)]
        assert facts["broadcast"] == [2.0]
        assert facts["json"] == [{"rank": n, "text": "x" * n} for n in range(3)]
        assert facts["said"] == ["from", 1]


def fails_on_rank_1(world: World) -> None:
    if world.rank == 1:
        raise ValueError("only here")
    dist.barrier()


def test_launcher_shows_the_error_of_the_rank_that_failed() -> None:
    with pytest.raises(RankError, match="only here"):
        run_ranks(fails_on_rank_1, 2)
