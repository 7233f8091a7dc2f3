"""Collectives over nested structures on real ranks."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

from accel_nb.accelerator import Accelerator
from accel_nb.errors import MisuseError
from accel_nb.runtime.distributed.collectives import Collectives
from accel_nb.runtime.distributed.communicator import LocalComm, TorchComm
from accel_nb.runtime.distributed.process_group import DefaultGroup
from accel_nb.runtime.tensors.nested import describe
from accel_nb.runtime.world import World
from tests.ranks.launch import run_ranks

Point = namedtuple("Point", "x y")


@dataclass(frozen=True)
class Record:
    boxes: torch.Tensor
    label: None = None


class Counting:
    """Passes calls on to a communicator and notes their names."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.world = inner, inner.world
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.inner, name)
        if not callable(value):
            return value

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            return value(*args, **kwargs)

        return call

    def taken(self) -> list[str]:
        calls, self.calls = self.calls, []
        return calls


def collectives_of(world: World, **options: Any) -> tuple[Collectives, Counting]:
    counting = Counting(TorchComm(world, DefaultGroup.adopt(world)) if world.size > 1 else LocalComm())
    return Collectives(counting, **options), counting


def sample(rank: int) -> dict[str, Any]:
    """Return one rank's part: every kind of container, uneven, scalar, empty, bool, and nothing at all on rank 0."""
    return {
        "pair": (torch.full((rank + 1, 2), float(rank)), [torch.tensor(rank)]),
        "point": Point(torch.full((rank, 3), rank, dtype=torch.int16), torch.tensor([rank > 0])),
        "record": Record(torch.full((2, 0, 4), float(rank), dtype=torch.bfloat16)),
        "proxy": MappingProxyType({"z": torch.tensor([1j * rank])}),
        "strided": torch.arange(6.0, dtype=torch.float64).reshape(2, 3).t() + rank,
        "none": None,
    }


def joined(size: int) -> Any:
    parts = [sample(rank) for rank in range(size)]

    def cat(get: Callable[[dict[str, Any]], torch.Tensor]) -> torch.Tensor:
        found = [get(part) for part in parts]
        return torch.stack(found) if found[0].dim() == 0 else torch.cat(found)

    return {
        "pair": (cat(lambda p: p["pair"][0]), [cat(lambda p: p["pair"][1][0])]),
        "point": Point(cat(lambda p: p["point"].x), cat(lambda p: p["point"].y)),
        "record": Record(cat(lambda p: p["record"].boxes)),
        "proxy": MappingProxyType({"z": cat(lambda p: p["proxy"]["z"])}),
        "strided": cat(lambda p: p["strided"]),
        "none": None,
    }


def as_lists(nested: Any) -> Any:
    """Return a comparable copy with the names of all types."""
    if isinstance(nested, torch.Tensor):
        return str(nested.dtype), list(nested.shape), nested.tolist()
    if isinstance(nested, dict | MappingProxyType):
        return type(nested).__name__, {key: as_lists(value) for key, value in nested.items()}
    if isinstance(nested, Record):
        return "Record", as_lists(nested.boxes), nested.label
    if isinstance(nested, list | tuple):
        return type(nested).__name__, [as_lists(item) for item in nested]
    return nested


def gathers(world: World) -> tuple[Any, list[str], list[str], list[str]]:
    collectives, counting = collectives_of(world)
    found = as_lists(collectives.gather(sample(world.rank)))
    calls = counting.taken()
    # One rank alone has more than goes along with a header.
    long = collectives.gather(torch.full((600 if world.rank == 0 else 2,), world.rank))
    assert long.tolist() == [0] * 600 + [rank for rank in range(1, world.size) for _ in range(2)]
    large = counting.taken()
    many = collectives.gather([torch.full((world.rank + index % 3,), index) for index in range(100)])
    assert [len(leaf) for leaf in many] == [sum(rank + index % 3 for rank in range(world.size)) for index in range(100)]
    assert all((leaf == index).all() for index, leaf in enumerate(many))
    return found, calls, large, counting.taken()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_nested_structure_is_gathered_in_one_message_and_a_large_one_in_two(size: int) -> None:
    for found, calls, large, many in run_ranks(gathers, size) if size > 1 else [gathers(World())]:
        assert found == as_lists(joined(size))
        assert calls == (["all_gather"] if size > 1 else [])
        assert large == (["all_gather"] * 2 if size > 1 else [])
        assert many == (["all_gather"] * 2 if size > 1 else [])  # lengths that do not fit into the header


def reduces(world: World) -> list[Any]:
    collectives, counting = collectives_of(world)
    rank = world.rank
    mine = {"a": torch.tensor([1.0 + rank]), "b": (torch.tensor(rank), torch.full((2, 2), float(rank)).t()), "n": None}
    before = describe(mine), mine["a"].clone()
    facts = [as_lists(collectives.reduce(mine)), counting.taken()]
    assert describe(mine) == before[0]
    assert torch.equal(mine["a"], before[1])
    flags = [torch.tensor([rank == 0, True, False])]
    facts.append([as_lists(collectives.reduce(flags, op)[0]) for op in ("sum", "mean", "max", "min")])
    facts.append(as_lists(collectives.reduce(torch.tensor([rank, 1]), "mean", 10.0)))
    facts.append([collectives.reduce(torch.tensor([float(rank)]), op).item() for op in ("max", "min")])
    facts.append(as_lists(collectives.reduce({"empty": torch.ones(0, 3)})["empty"]))
    parts = collectives.reduce([torch.ones(2), torch.ones(2)])
    weight = torch.ones(2, requires_grad=True)
    out = (weight * parts[0]).sum()
    parts[1].add_(1)  # not a view of the same memory, which autograd would refuse
    out.backward()
    return facts


def test_reducing_takes_one_collective_for_each_dtype() -> None:
    for facts in run_ranks(reduces, 3):
        assert facts[0] == (
            "dict",
            {
                "a": ("torch.float32", [1], [6.0]),
                "b": ("tuple", [("torch.int64", [], 3), ("torch.float32", [2, 2], [[3.0, 3.0], [3.0, 3.0]])]),
                "n": None,
            },
        )
        assert facts[1] == ["all_reduce"] * 2
        assert facts[2][0] == ("torch.int64", [3], [1, 3, 0])
        assert facts[2][1] == ("torch.float32", [3], [pytest.approx(1 / 3), 1.0, 0.0])
        assert facts[2][2] == ("torch.bool", [3], [True, True, False])
        assert facts[2][3] == ("torch.bool", [3], [False, True, False])
        assert facts[3] == ("torch.float32", [2], [10.0, 10.0])
        assert facts[4] == [2.0, 0.0]
        assert facts[5] == ("torch.float32", [0, 3], [])


def broadcasts(world: World) -> list[Any]:
    collectives, counting = collectives_of(world)
    mine = sample(world.rank)
    like = {"pair": (mine["strided"], mine["pair"][1]), "flag": torch.tensor(world.rank == 1), "n": None}
    facts = [as_lists(collectives.broadcast(like, 1)), counting.taken()]
    facts.append(
        as_lists(
            collectives.pad_across({"x": torch.full((1, world.rank + 1), world.rank), "s": torch.tensor(3)}, 1, -1)
        )
    )
    facts.append(counting.taken())
    facts.append(collectives.pad_across(torch.full((world.rank,), 5), 0, 0, pad_first=True).tolist())
    own = torch.full((2,), float(world.rank))
    collectives.broadcast(own, 1).add_(1)
    facts.append(own.tolist())
    facts.append(list(collectives.gather(torch.zeros(3, 0)).shape))
    with pytest.raises(MisuseError, match="there is no rank 2; ranks go from 0 to 1"):
        collectives.broadcast(torch.ones(1), 2)
    return facts


def test_broadcast_and_padding_take_one_message_each() -> None:
    first, second = run_ranks(broadcasts, 2)
    assert first[0] == second[0]
    assert first[0][1]["flag"] == ("torch.bool", [], True)
    assert first[0][1]["pair"][1][0][2] == (torch.arange(6.0).reshape(2, 3).t() + 1).tolist()
    assert first[1] == ["broadcast"]
    assert (first[5], second[5]) == ([0.0, 0.0], [1.0, 1.0])
    assert first[6] == [6, 0]
    assert first[2][1]["x"] == ("torch.int64", [1, 2], [[0, -1]])
    assert first[2][1]["s"] == second[2][1]["s"] == ("torch.int64", [], 3)
    assert second[2][1]["x"][2] == [[1, 1]]
    assert first[3] == ["all_gather"]
    assert (first[4], second[4]) == ([0], [5])


def scatters(world: World) -> list[Any]:
    collectives, counting = collectives_of(world)
    is_source = world.rank == 1
    whole = {
        "x": torch.arange(14).reshape(7, 2),
        "y": (torch.arange(2.0), torch.tensor(9, dtype=torch.int8)),
        "n": None,
    }
    facts = [as_lists(collectives.scatter(whole if is_source else None, 1)), counting.taken()]
    point = Point(torch.arange(3), Record(torch.ones(4, 1)))
    mine = point if is_source else Point(torch.empty(0), Record(torch.empty(0)))
    facts.append(as_lists(collectives.scatter(mine, 1)))
    for wrong in (point if is_source else None, whole if is_source else [torch.ones(1)], None):
        with pytest.raises(MisuseError, match="scatter cannot go on"):
            collectives.scatter(wrong, 1)
    collectives.barrier()
    return facts


def test_scatter_divides_what_one_rank_has() -> None:
    facts = run_ranks(scatters, 3)
    assert [fact[0][1]["x"][2] for fact in facts] == [
        [[0, 1], [2, 3], [4, 5]],
        [[6, 7], [8, 9]],
        [[10, 11], [12, 13]],
    ]
    assert [fact[0][1]["y"][1][0][2] for fact in facts] == [[0.0], [1.0], []]
    assert [fact[0][1]["y"][1][1] for fact in facts] == [("torch.int8", [], 9)] * 3
    assert facts[0][1] == ["all_gather", "scatter"]
    assert [fact[2][0] for fact in facts] == ["Point"] * 3
    assert [fact[2][1][1][1][1] for fact in facts] == [[2, 1], [1, 1], [1, 1]]


def objects(world: World) -> list[Any]:
    accelerator = Accelerator(world=world)
    rank = world.rank
    mine = {"rank": rank, (rank, "t"): [None, 1.5, b"x" * rank], "a": np.arange(rank), "t": torch.full((rank,), 2.0)}
    found = accelerator.gather_object(mine)
    assert [list(each["a"]) for each in found] == [[], [0]]
    assert [each["t"].tolist() for each in found] == [[], [2.0]]
    facts = [[each["rank"] for each in found], accelerator.gather_object([rank] * (rank + 1))]
    values = [f"from {rank}", {rank}]
    same = accelerator.broadcast_object_list(values, 1)
    assert same is values
    facts.append(values)
    with pytest.raises(MisuseError, match="builtins.object" if rank else "rank 1 passed"):
        accelerator.gather_object(object() if rank else 1)
    with pytest.raises(MisuseError, match="builtins.object" if rank else "rank 1 tried"):
        accelerator.broadcast_object_list([object()] if rank else [1], 1)
    accelerator.wait_for_everyone()
    return facts


def test_objects_travel_as_checked_messages() -> None:
    for facts in run_ranks(objects, 2):
        assert facts == [[0, 1], [0, 1, 1], ["from 1", {1}]]


WRONG: dict[str, Callable[[int], Any]] = {
    "shape": lambda rank: torch.ones(2, 3 + (rank == 1)),
    "dtype": lambda rank: torch.ones(2, dtype=torch.float64 if rank == 1 else torch.float32),
    "structure": lambda rank: {"b" if rank == 1 else "a": torch.ones(2)},
    "count": lambda rank: [torch.ones(2)] * (1 + (rank == 1)),
    "scalar": lambda rank: torch.ones(()) if rank == 1 else torch.ones(1),
    "leaf": lambda rank: [0.5] if rank == 1 else [torch.ones(1)],
    "sparse": lambda rank: torch.eye(2).to_sparse() if rank == 1 else torch.eye(2),
}


def differ(world: World) -> dict[str, str]:
    accelerator = Accelerator(world=world)
    said = {}
    for name, make in WRONG.items():
        try:
            accelerator.gather(make(world.rank))
        except MisuseError as error:
            said[name] = str(error)
    try:  # another call on one rank
        (accelerator.pad_across_processes if world.rank == 1 else accelerator.gather)(torch.ones(2))
    except MisuseError as error:
        said["call"] = str(error)
    try:
        (accelerator.gather_object if world.rank == 1 else accelerator.gather)(torch.ones(2))
    except MisuseError as error:
        said["objects"] = str(error)
    assert accelerator.gather(torch.tensor(world.rank)).tolist() == [0, 1, 2]
    return said


def test_ranks_that_differ_are_reported_on_every_rank_and_none_hangs() -> None:
    first, *others = run_ranks(differ, 3)
    for said in others:
        assert {name: text.partition(" cannot")[2] for name, text in said.items()} == {
            name: text.partition(" cannot")[2] for name, text in first.items()
        }
    assert set(first) == {*WRONG, "call", "objects"}
    assert first["objects"].splitlines()[1:3] == ["  rank 0: gather of float32[2]", "  rank 1: gather_object"]
    assert "rank 1 differs" in first["shape"]
    assert "rank 0: gather of float32[2, 3]" in first["shape"]
    assert "rank 1: gather of float32[2, 4]" in first["shape"]
    assert "float64[2]" in first["dtype"]
    assert "{'b': float32[2]}" in first["structure"]
    assert "got a float; make it a tensor, or use gather_object" in first["leaf"]
    assert "to_dense()" in first["sparse"]
    assert "pad_across_processes(dim=0) of float32[2]" in first["call"]


def differ_in_debug_mode(world: World) -> list[str]:
    accelerator = Accelerator(world=world, config={"debug": True})
    odd = world.rank == 1
    said = []

    def expect(call: Callable[[], Any]) -> None:
        try:
            call()
        except MisuseError as error:
            said.append(str(error))

    expect(lambda: accelerator.reduce(torch.ones(3 if odd else 2)))
    expect(lambda: accelerator.reduce(torch.ones(2), "max" if odd else "sum"))
    expect(lambda: accelerator.broadcast({"a": torch.ones(2)} if odd else [torch.ones(2)]))
    expect(accelerator.wait_for_everyone if odd else lambda: accelerator.reduce(torch.ones(1)))
    expect(lambda: accelerator.gather_object(1) if odd else accelerator.broadcast_object_list([1]))
    accelerator.wait_for_everyone()
    assert accelerator.reduce(torch.tensor([world.rank])).item() == 3
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerator.prepare(model, optimizer)
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    return said


class OffHost(torch.Tensor):
    """Stands for a tensor on a device."""

    is_cpu = False  # type: ignore[assignment]

    def cpu(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


def gathers_from_host_and_device(world: World) -> list[Any]:
    accelerator = Accelerator(world=world, cpu=True)

    def own(rows: int) -> torch.Tensor:
        made = torch.full((rows,), float(world.rank + 1))
        return made.as_subclass(OffHost) if world.rank else made

    short = [accelerator.gather(own(2)).tolist(), [part.tolist() for part in accelerator.gather([own(1), own(2)])]]
    return [*short, [accelerator.gather_for_metrics(own(2)).tolist(), accelerator.gather(own(3000)).sum().item()]]


def test_tensors_may_be_on_the_host_on_one_rank_and_on_a_device_on_another() -> None:
    expected = [[1, 1, 2, 2], [[1, 2], [1, 1, 2, 2]], [[1, 1, 2, 2], 9000]]
    assert run_ranks(gathers_from_host_and_device, 2) == [expected] * 2


def test_debug_mode_names_the_rank_that_differs_before_every_collective() -> None:
    first, *others = run_ranks(differ_in_debug_mode, 3)
    for said in others:
        assert [text.partition(" cannot")[2] for text in said] == [text.partition(" cannot")[2] for text in first]
    assert len(first) == 5
    assert all("rank 1 differs" in text for text in first)
    assert "rank 1: reduce('sum') of float32[3] at " in first[0]
    assert "test_collectives.py:" in first[0]
    assert "rank 1: reduce('max')" in first[1]
    assert "rank 1: barrier" in first[3]
    assert "rank 1: gather_object" in first[4]


def start_any(world: World) -> list[bool]:
    comm = TorchComm(world, DefaultGroup.adopt(world))
    first, second = comm.start_any(world.rank == 1), comm.start_any(False)
    return [second(), first()]


def test_flags_are_compared_in_the_background() -> None:
    assert run_ranks(start_any, 2) == [[False, True]] * 2


def test_one_process_refuses_what_several_would() -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(MisuseError, match="gather takes tensors"):
        accelerator.gather([1.0])
    with pytest.raises(MisuseError, match=r"tests\.ranks\.test_collectives\.Record"):
        accelerator.gather_object(Record(torch.ones(1)))
    assert accelerator.gather({"a": torch.tensor(1), "n": None}) == {"a": torch.tensor([1]), "n": None}
    assert accelerator.scatter([torch.arange(3)])[0].tolist() == [0, 1, 2]
    assert accelerator.gather_object([1, 2]) == [1, 2]
    assert accelerator.broadcast_object_list([1, 2]) == [1, 2]


def leaves_arguments(world: World) -> tuple[list[float], list[float], list[int]]:
    collectives, _ = collectives_of(world)
    own = torch.full((2,), float(world.rank))
    received = collectives.broadcast(own, source=1)
    empty = collectives.gather(torch.zeros(3, 0))
    return own.tolist(), received.tolist(), list(empty.shape)


def test_a_broadcast_leaves_its_argument_and_rows_without_values_are_counted() -> None:
    found = run_ranks(leaves_arguments, 2)
    assert found == [([float(rank)] * 2, [1.0, 1.0], [6, 0]) for rank in range(2)]


@pytest.mark.parametrize(
    ("make", "remedy"),
    [
        (lambda: torch.eye(2).to_sparse(), "to_dense"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(1)]), "to_padded_tensor"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "dequantize"),
    ],
)
def test_tensors_that_are_not_dense_are_refused_with_a_way_to_make_them_dense(
    make: Callable[[], torch.Tensor], remedy: str
) -> None:
    with pytest.raises(MisuseError, match=remedy):
        Collectives(LocalComm()).gather(make())


def test_the_mean_of_bools_has_the_default_dtype() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        mean = Collectives(LocalComm()).reduce(torch.tensor([True, False]), "mean")
    finally:
        torch.set_default_dtype(torch.float32)

    assert (mean.dtype, mean.tolist()) == (torch.float64, [1.0, 0.0])
