"""Plain code on several ranks: what is made inside of functions, loops that only count, models that change."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import logging
import os
import shutil
import subprocess
import sys
import sysconfig
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from accel_nb.accelerator import Accelerator
from accel_nb.accelerator.plain_cells.autoprepare import PlainCells
from accel_nb.runtime.world import World
from tests.conftest import wait_for
from tests.ranks.launch import run_ranks
from tests.ranks.plain_cells import plain_cells
from tests.support.nightly import nightly

Weights = list[float]


class Net(nn.Module):
    """A body and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


def data(num_samples: int = 14) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num_samples, 3, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randn(num_samples, 2, generator=generator, dtype=torch.float64))


def flat(model: nn.Module) -> Weights:
    return torch.cat([value.detach().flatten() for value in model.parameters()]).tolist()


def everything_in_a_function(batch: int, lr: float) -> Weights:
    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    for _ in range(2):
        for x, y in DataLoader(data(), batch_size=batch, shuffle=True):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            scheduler.step()
    return flat(model)


def function_cell() -> list[Weights]:
    torch.manual_seed(5)
    return [everything_in_a_function(4, lr) for lr in (0.1, 0.2, 0.3)]


class Trainer:
    """Holds all that it trains, as people write it."""

    def __init__(self) -> None:
        self.model = Net().double()
        self.optimizer = self.make_optimizer(self.model.parameters())
        self.loader = DataLoader(data(), batch_size=4)

    def make_optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.05)

    def batches(self) -> Any:
        yield from self.loader

    def step(self, x: Tensor, y: Tensor) -> None:
        loss = nn.functional.mse_loss(self.model(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def fit(self) -> Weights:
        for x, y in self.batches():
            self.step(x, y)
        return flat(self.model)


def trainer_cell() -> list[Weights]:
    torch.manual_seed(5)
    return [Trainer().fit()]


def two_closures_cell() -> list[Weights]:
    """Two models that only closures lead to, trained in turns."""
    torch.manual_seed(5)
    loader = DataLoader(data(), batch_size=4)

    def make(lr: float) -> tuple[Callable[[Tensor, Tensor], None], Callable[[], Weights]]:
        model = Net().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)

        def step(x: Tensor, y: Tensor) -> None:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()

        return step, lambda: flat(model)

    made = [make(lr) for lr in (0.1, 0.2)]
    for x, y in loader:
        for step, _ in made:
            step(x, y)
    return [weights() for _, weights in made]


def frozen_after_the_optimizer_cell() -> list[Weights]:
    """A layer is frozen after the optimizer was made, unfrozen for the second epoch, and one replaced for the third."""
    torch.manual_seed(5)
    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for value in model.body.parameters():
        value.requires_grad = False
    loader = DataLoader(data(), batch_size=4)
    for epoch in range(3):
        if epoch == 1:
            for value in model.body.parameters():
                value.requires_grad = True
        if epoch == 2:
            model.head = nn.Linear(4, 2, dtype=torch.float64)
            optimizer.add_param_group({"params": model.head.parameters()})
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    return [flat(model)]


def plateau_by_own_loss(world: World, waits: bool) -> tuple[list[float], bool]:
    """The mean of what ranks measure rises, and on rank 0 alone it would fall."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    accelerator = Accelerator(world=world, cpu=True, step_scheduler_with_optimizer=waits)
    accelerator.prepare(model, optimizer, scheduler)
    rates = []
    for measured in (3.0, 2.5 + 2 * world.rank, torch.tensor(2.0 + world.rank)):
        scheduler.step(measured)
        rates.append(optimizer.param_groups[0]["lr"])
    accelerator.close()
    return rates, type(scheduler) is torch.optim.lr_scheduler.ReduceLROnPlateau


@pytest.mark.parametrize("waits", [True, False])
def test_every_rank_lowers_the_learning_rate_at_the_same_time(waits: bool) -> None:
    assert run_ranks(plateau_by_own_loss, 2, waits) == [([0.1, 0.05, 0.05], True)] * 2


class Fitting(Net):
    """A model that trains itself, and holds its optimizer."""

    def fit(self, loader: Any) -> None:
        self.optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        for _ in range(3):
            for x, y in loader:
                self.optimizer.zero_grad()
                nn.functional.mse_loss(self(x), y).backward()
                self.optimizer.step()


def fitting_cell() -> list[Weights]:
    torch.manual_seed(5)
    model, loader = Fitting().double(), DataLoader(data(), batch_size=4, shuffle=True)
    model.fit(loader)
    model.fit(loader)
    return [flat(model)]


def searching_cell() -> list[Weights]:
    """An optimizer that decides by the loss how far it goes, on batches that do not divide evenly."""
    torch.manual_seed(5)
    model = Net().double()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, line_search_fn="strong_wolfe")
    losses = []
    for x, y in DataLoader(data(), batch_size=4):

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            return loss

        losses.append(float(optimizer.step(closure)))
    return [flat(model), losses]


def searching_by_another_loss_cell() -> list[Weights]:
    """Closures that return another loss than that of their backward pass: before scaling, as a number, one of two."""
    found = []
    for kind in ("scaled", "number", "one of two"):
        torch.manual_seed(5)
        model = Net().double()
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, line_search_fn="strong_wolfe")
        losses = []
        for x, y in DataLoader(data(), batch_size=4):

            def closure(x: Tensor = x, y: Tensor = y, optimizer: Any = optimizer, model: Any = model) -> Tensor | float:
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(x), y)
                if kind == "one of two":  # noqa: B023
                    nn.functional.l1_loss(model(x), y).backward()
                    loss.backward()
                else:
                    (loss / 2).backward()
                return loss.item() if kind == "number" else loss  # noqa: B023

            losses.append(float(optimizer.step(closure)))
        found += [flat(model), losses]
    return found


def sparse_cell() -> list[Weights]:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten(), nn.Linear(8, 2)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    words = torch.randint(0, 9, (14, 2), generator=torch.Generator().manual_seed(1))
    for (x,) in DataLoader(TensorDataset(words), batch_size=4):
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()
    return [flat(model)]


def loose_cell() -> list[Weights]:
    """A model that an optimizer steps, and then weights in no module that are stepped by hand."""
    torch.manual_seed(5)
    loader = DataLoader(data(), batch_size=4, shuffle=True)
    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    weights = [torch.zeros(3, 2, dtype=torch.float64, requires_grad=True)]
    for x, y in loader:
        nn.functional.mse_loss(x @ weights[0], y).backward()
        with torch.no_grad():
            gradient = weights[0].grad
            assert gradient is not None
            weights[0] -= 0.1 * gradient
            gradient.zero_()
    return [flat(model), weights[0].detach().flatten().tolist()]


class Engine:
    """Holds a trainer, and loops for it."""

    def __init__(self) -> None:
        self.trainer = Trainer()

    def run(self) -> Weights:
        for x, y in self.trainer.loader:
            self.trainer.step(x, y)
        return flat(self.trainer.model)


def engine_cell() -> list[Weights]:
    torch.manual_seed(5)
    return [Engine().run()]


CELLS = [
    engine_cell, fitting_cell, function_cell, trainer_cell, two_closures_cell, frozen_after_the_optimizer_cell,
    searching_cell, searching_by_another_loss_cell, sparse_cell, loose_cell,
]  # fmt: skip


def save_and_load(world: World, folder: str) -> list[bool]:
    model = nn.Linear(300, 300)
    found = []
    with plain_cells(world) as cells:
        cells.prepare(
            {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}, ["model", "optimizer"]
        )
        for _ in range(20):
            torch.save(model.state_dict(), f"{folder}/best.pt")
            found.append(torch.equal(torch.load(f"{folder}/best.pt")["weight"], model.weight))
    return found


def test_every_rank_saves_to_one_path_and_finds_a_whole_file(tmp_path: Path) -> None:
    assert run_ranks(save_and_load, 3, str(tmp_path)) == [[True] * 20] * 3
    assert [path.name for path in tmp_path.iterdir()] == ["best.pt"]


def run_cells(world: World) -> list[list[Weights]]:
    return [run_cell(world, number)[0] for number in range(len(CELLS))]


def run_cell(world: World, number: int) -> tuple[list[Weights], list[str]]:
    with plain_cells(world) as cells:
        return CELLS[number](), cells._accelerator.describe()["objects"]


@pytest.mark.parametrize("size", [2, 3])
def test_what_is_made_inside_of_functions_trains_as_on_one_device(size: int) -> None:
    expected = [cell() for cell in CELLS]
    for found in run_ranks(run_cells, size):
        for cell, weights, wanted in zip(CELLS, found, expected, strict=True):
            assert len(weights) == len(wanted), cell.__name__
            for ours, plain in zip(weights, wanted, strict=True):
                assert ours == pytest.approx(plain, abs=1e-10), cell.__name__


def count_models(world: World) -> tuple[int, int]:
    with plain_cells(world) as cells:
        function_cell()
        gc.collect()
        kept = [item for item in gc.get_objects() if isinstance(item, Net)]
        return len(cells._accelerator.components.stepper.bundle.models), len(kept)


def test_models_of_earlier_calls_are_given_back_and_released() -> None:
    assert run_ranks(count_models, 2) == [(1, 1)] * 2


def test_an_engine_around_a_trainer_divides_its_loader() -> None:
    _, objects = run_ranks(run_cell, 2, CELLS.index(engine_cell))[0]
    assert any("batch 4 = 2 x 2" in item for item in objects)


LIBRARY = """
import torch

def fit(model, make_loader):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in make_loader():
        optimizer.zero_grad()
        _loss(model, x, y).backward()
        optimizer.step()

def _loss(model, x, y):
    return torch.nn.functional.mse_loss(model(x), y)
"""


def trained_by_a_library(world: World) -> tuple[Weights, int]:
    library = types.ModuleType("some_library")
    library.__file__ = f"{sysconfig.get_path('purelib')}/some_library.py"
    sys.modules["some_library"] = library
    exec(LIBRARY, vars(library))
    torch.manual_seed(5)
    model = Net().double()
    with plain_cells(world) as cells:
        library.fit(model, lambda: iter(list(DataLoader(data(), batch_size=4))))
        return flat(model), len(cells._accelerator.prepared_objects)


def test_a_librarys_trainer_is_left_to_itself() -> None:
    alone = trained_by_a_library(World())[0]
    for weights, num_prepared in run_ranks(trained_by_a_library, 2):
        assert weights == pytest.approx(alone, abs=1e-12)
        assert num_prepared == 0


def count_around_training(world: World) -> tuple[int, list[int], int]:
    loader = DataLoader(data(), batch_size=4)
    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trained = []
    with plain_cells(world) as cells:
        before = count(loader)
        cells.prepare({"loader": loader, "model": model, "optimizer": optimizer}, ["loader", "model", "optimizer"])
        train_and_note(loader, model, optimizer, trained)
        after = count(loader)
    return before, trained, after


def count(loader: Any) -> int:
    return sum(len(x) for x, _ in loader)


def train_and_note(loader: Any, model: nn.Module, optimizer: torch.optim.Optimizer, trained: list[int]) -> None:
    for x, y in loader:
        trained.append(len(x))
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_every_loop_sees_every_sample() -> None:
    for before, trained, after in run_ranks(count_around_training, 2):
        assert (before, sum(trained), after) == (14, 14, 14)


def gradients_of(model: nn.Module, x: Tensor, y: Tensor) -> None:
    nn.functional.mse_loss(model(x), y).backward()


HOW = {"gradients": gradients_of}


def step_function_that_cannot_be_seen(world: World) -> tuple[Weights, list[str]]:
    import warnings

    torch.manual_seed(5)
    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with plain_cells(world) as cells, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cells.prepare({"model": model, "optimizer": optimizer}, ["model", "optimizer"])
        for x, y in DataLoader(data(), batch_size=4):
            HOW["gradients"](model, x, y)
            optimizer.step()
            optimizer.zero_grad()
    return flat(model), [str(item.message) for item in caught]


def test_a_loop_whose_backward_pass_is_not_found_trains_as_on_one_device() -> None:
    torch.manual_seed(5)
    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in DataLoader(data(), batch_size=4):
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    first, second = run_ranks(step_function_that_cannot_be_seen, 2)
    assert first[0] == pytest.approx(flat(model), abs=1e-10)
    assert second[0] == pytest.approx(flat(model), abs=1e-10)
    assert first[1] == []


def writes_in_every_way(world: World, folder: str, marks: Path, is_main_ahead: bool) -> dict[str, Any]:
    """What a cell writes and reads back; what it holds differs by rank, so that it shows whose is read.

    Either rank 0 has done all before the others begin, or they have done all before it begins.
    """
    with plain_cells(world):
        others = [rank for rank in range(world.size) if (rank == 0) == is_main_ahead]
        if world.rank not in others:
            assert wait_for(lambda: all((marks / str(rank)).exists() for rank in others), 30)
        found = write_in_every_way(world, folder)
        os.close(os.open(marks / str(world.rank), os.O_CREAT))  # which is no function whose files are redirected
    torch.distributed.barrier()  # the others read what rank 0 keeps
    return found


def write_in_every_way(world: World, folder: str) -> dict[str, Any]:
    mine = f"rank {world.rank}"
    place = Path(folder)
    found: dict[str, Any] = {}
    os.chdir(folder)
    with open("best.pt", "wb") as file:
        torch.save({"of": mine}, file)
    found["handle"] = torch.load("best.pt")["of"]
    torch.save(obj={"of": mine}, f=place / "named.pt")
    found["path"] = torch.load(f=place / "named.pt")["of"]
    os.makedirs("runs/one", exist_ok=True)
    Path("runs/one/log.txt").write_text(mine)
    found["text"] = Path("runs/one/log.txt").read_text()
    np.save("runs/array.npy", np.full(3, world.rank))
    found["array"] = int(np.load("runs/array.npy")[0])
    with open("runs/history.jsonl", "a") as file:
        file.write(f"{mine}\n")
    with open("earlier.txt", "a") as file:
        file.write(f"{mine}\n")
    found["appended"] = Path("earlier.txt").read_text()
    Path("part.tmp").write_text(mine)
    os.replace("part.tmp", "whole.txt")
    found["replaced"] = (Path("whole.txt").read_text(), os.path.exists("part.tmp"))
    os.remove("unwanted.txt")
    shutil.rmtree("old")
    found["removed"] = (os.path.exists("unwanted.txt"), Path("old/file.txt").exists())
    found["listed"] = sorted(os.listdir("runs")), sorted(path.name for path in Path("runs").glob("*.npy"))
    found["size"] = os.path.getsize("whole.txt") == len(mine)
    with pytest.raises(FileNotFoundError, match="missing/file"):
        Path("missing/file").write_text("")
    with pytest.raises(FileNotFoundError, match="unwanted"):
        Path("unwanted.txt").read_text()
    handler = logging.FileHandler("train.log")
    handler.emit(logging.makeLogRecord({"msg": mine}))
    handler.close()
    return found


@pytest.mark.parametrize("is_main_ahead", [True, False])
def test_a_plain_cell_writes_each_file_once_and_every_rank_reads_its_own(tmp_path: Path, is_main_ahead: bool) -> None:
    folder, marks = tmp_path / "cell", tmp_path / "marks"
    marks.mkdir()
    (folder / "old").mkdir(parents=True)
    for name in ("unwanted.txt", "old/file.txt"):
        (folder / name).write_text("old")
    (folder / "earlier.txt").write_text("before\n")
    for rank, found in enumerate(run_ranks(writes_in_every_way, 3, str(folder), marks, is_main_ahead)):
        mine = f"rank {rank}"
        assert [found[name] for name in ("handle", "path", "text", "array")] == [mine, mine, mine, rank]
        assert found["appended"] == f"before\n{mine}\n"
        assert found["replaced"] == (mine, False)
        assert found["removed"] == (False, False)
        assert found["listed"] == (["array.npy", "history.jsonl", "one"], ["array.npy"])
        assert found["size"]
    held = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    texts = ["earlier.txt", "runs/history.jsonl", "runs/one/log.txt", "train.log", "whole.txt"]
    assert sorted(held) == sorted(["best.pt", "named.pt", "runs/array.npy", *texts]), "nothing of the other ranks"
    assert [held[name].read_text().split() for name in texts] == [["before", "rank", "0"]] + [["rank", "0"]] * 4


def files_of_each_rank(world: World, folder: str) -> bool:
    accelerator = Accelerator(world=world, cpu=True)
    cells = PlainCells(accelerator)
    with cells.run_cell(may_depend_on_rank=True):
        Path(f"{folder}/{world.rank}.txt").write_text("x")
    with cells.run_cell():
        pass
    with open(f"{folder}/after_{world.rank}.txt", "w") as file:
        file.write("x")
    accelerator.close()
    return any(hasattr(function, "__wrapped__") for function in (open, io.open, os.stat, os.remove, torch.save))


def test_a_cell_that_depends_on_the_rank_writes_on_all_of_them(tmp_path: Path) -> None:
    assert run_ranks(files_of_each_rank, 2, str(tmp_path)) == [False, False], "all is put back"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.txt", "1.txt", "after_0.txt", "after_1.txt"]


class Scaled(nn.Module):
    """A model whose code makes tensors, as libraries' do that are compiled when they are imported."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x: Tensor, scale: float = 2.0) -> Tensor:
        shift = torch.zeros(2, device=x.device) + torch.ones_like(x[:, :2]) + torch.arange(2)
        return self.norm(self.layer(x)) * scale + shift


def compiled_in_a_cell(world: World, precision: str) -> dict[str, Any]:
    torch.manual_seed(3)
    model, x = Scaled(), torch.randn(6, 3)
    accelerator = Accelerator(world=world, cpu=True, mixed_precision=precision)
    cells = PlainCells(accelerator)
    found: dict[str, Any] = {}
    with cells.run_cell():
        cells.prepare(
            {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}, ["model", "optimizer"]
        )
        model(x).sum().backward()
        parameters = list(inspect.signature(model.forward).parameters)
        replacement = torch.zeros
        for is_training in (True, False):
            model.train(is_training)
            made = [
                torch.jit.script(model),
                torch.jit.trace(model, x, check_trace=False),
                torch.export.export(model, (x,)).module(),
            ]
            found[str(is_training)] = [type(item(x)) is Tensor for item in made]
        expected = copy.deepcopy(model)(x)
        found["equal"] = [torch.allclose(item(x), expected, atol=1e-6) for item in made]
    accelerator.close()
    known = torch.jit._builtins._get_builtin_table()
    found["put back"] = id(replacement) not in known and id(torch.zeros) in known
    found["parameters"] = parameters == ["x", "scale"]
    return found


@pytest.mark.parametrize("precision", ["no", nightly("bf16")])
def test_a_prepared_model_is_scripted_traced_and_exported_as_the_plain_one(precision: str) -> None:
    for found in run_ranks(compiled_in_a_cell, 2, precision):
        assert found == {
            "True": [True] * 3, "False": [True] * 3, "equal": [True] * 3, "put back": True, "parameters": True,
        }  # fmt: skip


def errors_of_commands(world: World) -> list[str]:
    """Return the errors of commands that rank 0 runs for all."""
    program = "import os, sys; os.write(1, bytes([255])); sys.exit(int(sys.argv[1]))"
    found: list[str] = []
    with plain_cells(world):
        for status, options in ((0, {"text": True, "encoding": "utf8"}), (3, {}), (0, {"stdout": 1, "nothing": 1})):
            try:
                subprocess.run(
                    [sys.executable, "-c", program, str(status)], **{"capture_output": True, **options}, check=True
                )
            except Exception as error:
                found.append(f"{type(error).__module__}.{type(error).__name__}: {error}")
    return found


def test_the_error_of_a_command_is_the_same_on_every_rank() -> None:
    first, second = run_ranks(errors_of_commands, 2)
    assert first == second
    assert [text.partition(":")[0] for text in first] == [
        "builtins.UnicodeDecodeError",
        "subprocess.CalledProcessError",
        "builtins.ValueError",
    ]
