"""Loaders under options on real ranks: training equals one process, and metrics hold each sample once."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from accel_nb.accelerator import Accelerator
from accel_nb.accelerator.options.plugins import DataLoaderConfiguration
from accel_nb.accelerator.plain_cells.autoprepare import PlainCells
from accel_nb.errors import MisuseError
from accel_nb.runtime.distributed.communicator import LocalComm, TorchComm
from accel_nb.runtime.distributed.process_group import DefaultGroup
from accel_nb.runtime.world import World
from accel_nb.strategies import StrategyRegistry
from accel_nb.strategies.base import Capabilities
from accel_nb.strategies.ddp.strategy import Ddp
from tests.contract.recipes import Recipe, assert_equal_weights, by_hand, explicit
from tests.ranks.launch import run_ranks
from tests.support.nightly import nightly


class Paired(Ddp):
    """Two neighbors share one model, so to speak: they must read the same data."""

    name: ClassVar[str] = "paired"
    capabilities: ClassVar[Capabilities] = Capabilities(min_world=2)

    def data_coords(self) -> tuple[int, int]:
        return self._world.rank // 2, self._world.size // 2


PAIRED = StrategyRegistry([EntryPoint("paired", f"{__name__}:Paired", "accel_nb.strategies")])


class Numbers(Dataset[Any]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return {"x": torch.tensor(float(index)), "name": f"n{index}"}


class Flow(IterableDataset[Any]):
    """A stream that can be divided by files of five samples if ``divides``."""

    def __init__(self, numbers: list[int], divides: bool = False) -> None:
        self.numbers = numbers
        self.divides = divides

    @property
    def n_shards(self) -> int:
        return -(-len(self.numbers) // 5) if self.divides else 1

    def shard(self, num_shards: int, index: int) -> Flow:
        files = [self.numbers[at : at + 5] for at in range(0, len(self.numbers), 5)]
        return Flow([number for file in files[index::num_shards] for number in file])

    def __iter__(self) -> Any:
        return iter({"x": torch.tensor(float(number)), "name": f"n{number}"} for number in self.numbers)


# --- training ---


def trained(world: World, config: dict[str, Any], paired: bool) -> list[dict[str, torch.Tensor]]:
    options: dict[str, Any] = {"dataloader_config": DataLoaderConfiguration(split_batches=True, **config)}
    if paired:
        options["registry"] = PAIRED
    return [explicit(world, recipe, **options) for recipe in RECIPES]


RECIPES = [Recipe(), Recipe(num_samples=13, accumulate=2), Recipe(num_samples=24, accumulate=2, clip=0.3)]


@pytest.mark.parametrize("size", [nightly(2), 3])
def test_a_dispatched_loader_trains_as_one_process_does(size: int) -> None:
    for found in run_ranks(trained, size, {"dispatch_batches": True}, False):
        for weights, recipe in zip(found, RECIPES, strict=True):
            assert_equal_weights(weights, by_hand(recipe))


@pytest.mark.parametrize("dispatch", [None, True])
@pytest.mark.parametrize("size", [nightly(2), 4])
def test_ranks_that_share_a_model_train_as_one_process_does(size: int, dispatch: bool | None) -> None:
    for found in run_ranks(trained, size, {"dispatch_batches": dispatch}, True):
        for weights, recipe in zip(found, RECIPES, strict=True):
            assert_equal_weights(weights, by_hand(recipe))


@pytest.mark.parametrize("size", [nightly(2), 3])
def test_the_seeded_order_is_the_same_on_any_number_of_ranks(size: int) -> None:
    config = {"use_seedable_sampler": True, "data_seed": 4}
    alone = trained(World(), config, False)

    for found in run_ranks(trained, size, config, False):
        for weights, expected, recipe in zip(found, alone, RECIPES, strict=True):
            assert_equal_weights(weights, expected)
            with pytest.raises(AssertionError):  # another order than that of the global generator
                assert_equal_weights(weights, by_hand(recipe))


def test_even_shares_weigh_equally_where_nothing_is_repeated() -> None:
    (recipe,) = [Recipe(num_samples=24)]
    for found in run_ranks(trained_evenly, 2, recipe):
        assert_equal_weights(found, by_hand(recipe))


def trained_evenly(world: World, recipe: Recipe) -> dict[str, torch.Tensor]:
    return explicit(world, recipe, dataloader_config=DataLoaderConfiguration(even_batches=True))


# --- metrics ---

CASES = {
    "global": ("map", "global", {}),
    "per worker": ("map", "per-worker", {}),
    "global, even": ("map", "global", {"even_batches": True}),
    "per worker, even": ("map", "per-worker", {"even_batches": True}),
    "dispatched": ("map", "per-worker", {"dispatch_batches": True}),
    "dispatched, even": ("map", "global", {"dispatch_batches": True, "even_batches": True}),
    "stream": ("stream", "global", {}),
    "stream read whole": ("stream", "per-worker", {"dispatch_batches": False}),
    "stream dispatched": ("stream", "per-worker", {}),
    "stream, even": ("stream", "per-worker", {"even_batches": True}),
    "own files": ("files", "per-worker", {}),
    "own files, even": ("files", "per-worker", {"even_batches": True}),
}


def gathered(world: World, kind: str, batch: Any, config: dict[str, Any], count: int, paired: bool) -> dict[str, Any]:
    accelerator = Accelerator(
        world=world, cpu=True, batch=batch, dataloader_config=DataLoaderConfiguration(**config),
        registry=PAIRED if paired else None,
    )  # fmt: skip
    dataset: Any = Numbers(count) if kind == "map" else Flow(list(range(count)), kind == "files")
    loader = accelerator.prepare(DataLoader(dataset, batch_size=4))
    found: dict[str, Any] = {"x": [], "name": [], "object": [], "pairs": [], "tensors": [], "scalars": 0}
    for item in loader:
        nested = {"rows": (item["x"] * 2, [item["name"]]), "note": "own", "s": item["x"].sum()}
        result = accelerator.gather_for_metrics(nested)
        found["x"] += (result["rows"][0] / 2).tolist()
        found["name"] += result["rows"][1][0]
        assert result["note"] == "own"
        found["scalars"] += len(result["s"])
        found["object"] += accelerator.gather_for_metrics(item["name"])
        rows = [[name, {"of": value}] for name, value in zip(item["name"], item["x"].tolist(), strict=True)]
        found["pairs"] += accelerator.gather_for_metrics(rows, use_gather_object=True)
        found["tensors"] += [float(row) for row in accelerator.gather_for_metrics(item["x"], use_gather_object=True)]
    accelerator.close()
    return found


def gathered_all(world: World, paired: bool) -> dict[str, Any]:
    return {
        f"{name}, {count}": gathered(world, *case, count, paired)
        for name, case in CASES.items()
        for count in (24, 23, 17, 9, 2, 1)
        if case[0] != "files" or count > 10
    }


@pytest.mark.parametrize(("size", "paired"), [(1, False), nightly(2, False), (3, False), nightly(2, True), (4, True)])
def test_metrics_hold_each_sample_once_and_in_order(size: int, paired: bool) -> None:
    per_rank = run_ranks(gathered_all, size, paired) if size > 1 else [gathered_all(World(), paired)]
    for found in per_rank:
        for case, values in found.items():
            expected = list(range(int(case.rpartition(" ")[2])))
            order = sorted if "files" in case else list
            assert order(int(value) for value in values["x"]) == expected, case
            assert order(int(name[1:]) for name in values["name"]) == expected, case
            assert values["object"] == values["name"], case
            assert [pair[0] for pair in values["pairs"]] == values["name"], case
            assert [pair[1]["of"] for pair in values["pairs"]] == values["tensors"] == values["x"], case
    assert len({str(sorted(found["global, 24"].items())) for found in per_rank}) == 1


def rows_of_no_sample(world: World, as_objects: bool) -> list[str]:
    accelerator = Accelerator(world=world, cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=True))
    loader = accelerator.prepare(DataLoader(Numbers(9), batch_size=4))
    messages = []
    for item in loader:
        rows = torch.cat([item["x"], item["x"][:1]])
        try:
            accelerator.gather_for_metrics(rows.tolist() if as_objects else rows)
        except MisuseError as error:
            messages.append(str(error))
    return messages


@pytest.mark.parametrize("as_objects", [False, True])
def test_rows_of_no_sample_are_an_error_on_every_rank_where_samples_were_repeated(as_objects: bool) -> None:
    (first,), (second,) = run_ranks(rows_of_no_sample, 2, as_objects)

    assert "5 rows from a batch of 4 samples, the last 3 of which even_batches has repeated" in first
    assert "5 rows from a batch of 4 samples, the last 4" in second


def gathers_other_containers(world: World, count: int) -> dict[str, list[Any]]:
    accelerator = Accelerator(world=world, cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=True))
    loader = accelerator.prepare(DataLoader(Numbers(count), batch_size=4))
    found: dict[str, list[Any]] = {"array": [], "dict": [], "lists": [], "beside": [], "words": []}
    for item in loader:
        x, tokens = item["x"].numpy(), [[int(value)] * 2 for value in item["x"]]
        found["array"] += [int(value) for part in accelerator.gather_for_metrics(x) for value in part]
        for part in accelerator.gather_for_metrics({"a": x, "b": (tokens, "note")}):
            assert [int(value) for value in part["a"]] == [first for first, _ in part["b"][0]]
            found["dict"] += part["a"].tolist()
        found["lists"] += [value for part in accelerator.gather_for_metrics([x.tolist()] * 3) for value in part]
        beside = accelerator.gather_for_metrics({"tensor": item["x"], "array": x[:, None], "list": x.tolist()})
        assert beside["tensor"].tolist() == beside["array"][:, 0].tolist() == beside["list"]
        found["beside"] += beside["list"]
        words = accelerator.gather_for_metrics(np.array([[f"n{value:.0f}"] for value in x]), use_gather_object=True)
        found["words"] += [int(word[1:]) for part in words for [word] in part]
    accelerator.close()
    return found


@pytest.mark.parametrize("count", [9, 14])
def test_arrays_and_nested_lists_hold_each_sample_once(count: int) -> None:
    expected = list(range(count))
    for found in run_ranks(gathers_other_containers, 2, count):
        lists = found.pop("lists")
        assert sorted(lists) == sorted(expected * 3)
        for name, values in found.items():
            assert values == expected, name


def gathers_different_kinds(world: World) -> list[str]:
    accelerator, messages = Accelerator(world=world, cpu=True), []
    rows = torch.ones(2)
    for mine, others in (
        (rows, None),
        (rows, rows.tolist()),
        ({"a": rows, "b": [1]}, {"a": rows, "b": None}),
        ({"a": rows}, rows),
    ):
        with pytest.raises(MisuseError) as caught:
            accelerator.gather_for_metrics(others if world.rank else mine)
        messages.append(str(caught.value))
    messages += map(str, accelerator.gather_for_metrics({"a": rows, "note": world.rank})["a"].tolist())
    return messages


def test_values_of_different_kinds_are_an_error_on_every_rank() -> None:
    first, second = run_ranks(gathers_different_kinds, 2)
    assert [text.partition(" cannot")[2] for text in first] == [text.partition(" cannot")[2] for text in second]
    assert "rank 0: gather of [float32[2]]\n  rank 1: gather_object" in first[0]
    assert "rank 0: gather of {'a': float32[2], 'b': []}\n  rank 1: gather of {'a': float32[2], 'b': None}" in first[2]
    assert first[4:] == ["1.0"] * 4


def scalars_of_ranks(world: World, count: int) -> list[list[int]]:
    accelerator = Accelerator(world=world, cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=True))
    loader = accelerator.prepare(DataLoader(Numbers(count), batch_size=4))
    found = []
    for item in loader:
        mean = item["x"].mean()
        values: list[Any] = [mean, mean.reshape(1), {"counts": mean.reshape(1)}]
        lengths = [len(accelerator.gather_for_metrics(value)) for value in values[:2]]
        lengths.append(len(accelerator.gather_for_metrics(values[2])["counts"]))
        lengths.append(len(accelerator.gather_for_metrics([float(mean)])))
        found.append(lengths)
    return found


def test_a_rank_that_has_only_repeated_samples_adds_no_scalar_and_no_single_row() -> None:
    assert run_ranks(scalars_of_ranks, 2, 9) == [[[2] * 4, [1] * 4]] * 2
    assert run_ranks(scalars_of_ranks, 2, 14) == [[[2] * 4] * 2] * 2


PADDED = ("global", "per worker", "global, even", "per worker, even", "dispatched", "stream read whole")


def other_lengths(world: World, case: str, count: int) -> dict[str, Any]:
    """What loops gather that is not one row for each sample: a loss for a full batch, several rows, tokens."""
    kind, batch, config = CASES[case]
    accelerator = Accelerator(
        world=world, cpu=True, batch=batch, dataloader_config=DataLoaderConfiguration(**config)
    )  # fmt: skip
    dataset: Any = Numbers(count) if kind == "map" else Flow(list(range(count)), False)
    loader = accelerator.prepare(DataLoader(dataset, batch_size=4))
    found: dict[str, Any] = {"losses": [], "listed": [], "several": [], "tokens": []}
    for _ in range(2):
        for item in loader:
            loss = item["x"].double().mean()
            losses = accelerator.gather_for_metrics({"loss": loss.repeat(4), "listed": loss.repeat(4).tolist()})
            found["losses"] += losses["loss"].tolist()
            found["listed"] += losses["listed"]
            found["several"] += accelerator.gather_for_metrics(item["x"].repeat_interleave(3)).tolist()
            if "even" not in case:
                lengths = item["x"].long() % 3 + 1
                found["tokens"] += accelerator.gather_for_metrics(item["x"].repeat_interleave(lengths)).tolist()
    accelerator.close()
    return found


def all_other_lengths(world: World) -> list[tuple[str, int, dict[str, Any]]]:
    return [(case, count, other_lengths(world, case, count)) for case in PADDED for count in (16, 23, 17)]


@pytest.mark.parametrize("size", [1, nightly(2), 3])
def test_losses_of_a_short_batch_count_its_samples_however_many_rows_there_are(size: int) -> None:
    per_rank = run_ranks(all_other_lengths, size) if size > 1 else [all_other_lengths(World())]
    for case, count, found in (item for results in per_rank for item in results):
        expected = [number for number in range(count) for _ in range(3)]
        assert [int(value) for value in found["several"]] == expected * 2, (case, count)
        tokens = [number for number in range(count) for _ in range(number % 3 + 1)]
        assert found["tokens"] in ([], tokens * 2), (case, count)
        # The mean of a loss counts samples that were repeated in the batch; and 3 ranks share 4 samples unevenly.
        if "even" not in case and (size, case) != (3, "global"):
            for losses in (found["losses"], found["listed"]):
                assert sum(losses) / len(losses) == pytest.approx((count - 1) / 2), (case, count)


def padded_in_a_plain_cell(world: World) -> tuple[float, float]:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    test = DataLoader(Numbers(11), batch_size=4)
    accelerator = Accelerator(world=world, cpu=True)
    cells = PlainCells(accelerator)
    cells.prepare(locals(), ["model", "optimizer", "test"])
    losses, rows = [], []
    with cells.run_cell(), torch.no_grad():
        for item in test:
            loss = item["x"].double().mean()
            losses += accelerator.gather_for_metrics(loss.repeat(4)).tolist()
            rows += accelerator.gather_for_metrics((item["x"], "note"))[0].tolist()
    accelerator.close()
    assert rows == list(range(11))
    return sum(losses) / len(losses), len(losses)


@pytest.mark.parametrize("size", [1, 2])
def test_losses_of_a_batch_that_is_read_whole_count_its_samples(size: int) -> None:
    found = run_ranks(padded_in_a_plain_cell, size)
    assert all(mean == pytest.approx(5) and count == 11 for mean, count in found)


def evaluated(world: World) -> dict[str, Any]:
    """A plain cell that evaluates: after training, inside of it, and after a loop that was left."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    train, test = DataLoader(Numbers(8), batch_size=4), DataLoader(Numbers(5), batch_size=2)
    accelerator = Accelerator(world=world, cpu=True)
    cells = PlainCells(accelerator)
    cells.prepare(locals(), ["model", "optimizer", "train", "test"])
    facts: dict[str, Any] = {"inside": [], "trained": [], "left": [], "after": []}

    def evaluate(into: list[float], stop: int | None = None) -> None:
        model.eval()
        with torch.no_grad():
            for number, item in enumerate(test):
                into += accelerator.gather_for_metrics(item["x"]).tolist()
                if number == stop:
                    break
        model.train()

    with cells.run_cell():
        for item in train:
            evaluate(facts["inside"])
            model(item["x"].float().reshape(-1, 1)).mean().backward()
            facts["trained"] += accelerator.gather_for_metrics(item["x"]).tolist()
            evaluate(facts["left"], stop=0)
            facts["trained"] += accelerator.gather_for_metrics(item["x"]).tolist()
        for _ in train:
            break
        evaluate(facts["after"])
    accelerator.close()
    return facts


def test_what_every_rank_reads_whole_is_not_gathered_twice() -> None:
    for facts in run_ranks(evaluated, 2):
        assert facts["inside"] == [0, 1, 2, 3, 4] * 2
        assert facts["left"] == [0, 1] * 2
        assert facts["trained"] == [0, 1, 2, 3] * 2 + [4, 5, 6, 7] * 2
        assert facts["after"] == [0, 1, 2, 3, 4]


# --- the collective ---


def scattered(world: World) -> list[Any]:
    comm = TorchComm(world, DefaultGroup.adopt(world))
    parts = [torch.full((3,), 10 * rank) for rank in range(world.size)]
    found = []
    for source in range(world.size):
        out = comm.scatter(torch.zeros(3, dtype=torch.int64), parts if world.rank == source else None, source)
        found.append(out.tolist())
    return found


@pytest.mark.parametrize("size", [nightly(2), 3])
def test_scatter_gives_each_rank_its_part(size: int) -> None:
    assert run_ranks(scattered, size) == [[[10 * rank] * 3] * size for rank in range(size)]


def test_scatter_in_a_world_of_one_and_with_wrong_parts() -> None:
    comm = LocalComm()

    assert comm.scatter(torch.zeros(2), [torch.ones(2)]).tolist() == [1, 1]
    for parts in (None, [], [torch.ones(2)] * 2):
        with pytest.raises(MisuseError, match="one part for each of the 1 ranks"):
            comm.scatter(torch.zeros(2), parts)
