"""Checkpoints on real ranks: going on exactly as before, and on another number of ranks."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from accel_nb.accelerator import Accelerator
from accel_nb.checkpoint import save as save_module
from accel_nb.checkpoint.background_save import CheckpointSaver
from accel_nb.checkpoint.encoding import FromRankZero, Slice
from accel_nb.checkpoint.layout import Region, full_region
from accel_nb.checkpoint.load import materialize, open_checkpoint
from accel_nb.checkpoint.manifest import CheckpointOrigin
from accel_nb.checkpoint.store import LocalStore
from accel_nb.checkpoint.store_url import open_store
from accel_nb.errors import CheckpointError
from accel_nb.runtime.distributed.communicator import Communicator, LocalComm, TorchComm
from accel_nb.runtime.distributed.process_group import DefaultGroup
from accel_nb.runtime.world import World
from tests.conftest import wait_for
from tests.ranks.launch import run_ranks
from tests.support.nightly import nightly

FACTS = CheckpointOrigin(run="r", step=3, world_size=0, strategy="ddp")


def comm_of(world: World) -> Communicator:
    return LocalComm(world) if world.size == 1 else TorchComm(world, DefaultGroup.adopt(world))


class Training:
    """A model with buffers, dropout and a schedule, on batches that differ between ranks."""

    def __init__(self, world: World, kind: str, folder: Path | None = None, **options: Any) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 2)
        )
        parameters = self.model.parameters()
        if kind == "sgd":
            self.optimizer: Any = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
        else:
            self.optimizer = torch.optim.AdamW(parameters, lr=0.01, amsgrad=True)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 4, 5])
        config = {"checkpoint": {"dir": str(folder)}} if folder else None
        self.accelerator = Accelerator(world=world, cpu=True, seed=7, config=config, **options)
        self.accelerator.prepare(self.model, self.optimizer, self.scheduler)
        self.accelerator.components.preparer.seed_ranks_separately()  # as the first batch of a divided loader does

    def micro_batches(self, count: int) -> None:
        """Draw a batch, train on it, and step: of the generators that a checkpoint must carry."""
        for _ in range(count):
            with self.accelerator.accumulate():
                self.accelerator.backward(self.model(torch.randn(5, 4)).square().mean())
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()

    def end(self) -> dict[str, Tensor]:
        state = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.accelerator.close()
        return state


def resume(world: World, kind: str, folder: Path, blocking: bool, options: dict[str, Any]) -> list[dict[str, Tensor]]:
    first = Training(world, kind, folder, **options)
    first.micro_batches(3)
    first.accelerator.save_state(blocking=blocking)
    first.micro_batches(4)
    uninterrupted = first.end()

    second = Training(world, kind, **options)
    second.micro_batches(1)  # must leave no trace
    report = second.accelerator.load_state(folder)
    assert report.notes == (), report
    second.micro_batches(4)
    return [uninterrupted, second.end()]


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("kind", ["sgd", "adam"])
@pytest.mark.parametrize("size", [nightly(1), 2, nightly(3)])
def test_a_resumed_run_ends_with_the_same_bits(size: int, kind: str, blocking: bool, tmp_path: Path) -> None:
    for uninterrupted, resumed in run_ranks(resume, size, kind, tmp_path, blocking, {}):
        assert uninterrupted.keys() == resumed.keys()
        assert all(torch.equal(uninterrupted[name], resumed[name]) for name in resumed)


@pytest.mark.parametrize(
    "options", [{"gradient_accumulation_steps": 2}, {"mixed_precision": "fp16"}, {"mixed_precision": "bf16"}]
)
def test_window_and_precision_are_part_of_the_state(options: dict[str, Any], tmp_path: Path) -> None:
    for uninterrupted, resumed in run_ranks(resume, 2, "adam", tmp_path, False, options):
        assert all(torch.equal(uninterrupted[name], resumed[name]) for name in resumed)


def save_only(world: World, folder: Path, options: dict[str, Any]) -> dict[str, Tensor]:
    training = Training(world, "adam", folder, **options)
    training.micro_batches(3)
    training.accelerator.save_state()
    return training.end()


def load_only(world: World, folder: Path) -> tuple[dict[str, Tensor], tuple[str, ...], Any, list[float]]:
    training = Training(world, "adam")
    report = training.accelerator.load_state(folder)
    draws = [float(part) for part in training.accelerator.gather(torch.rand(1))]
    state = training.optimizer.state_dict()
    return training.end(), report.notes, state, draws


@pytest.mark.parametrize("saved", [nightly(1), nightly(2), 3, nightly(4)])
def test_any_number_of_ranks_loads_what_any_number_saved(saved: int, tmp_path: Path) -> None:
    weights = run_ranks(save_only, saved, tmp_path, {})[0]
    for loading in (1, 2, 3, 4):
        results = run_ranks(load_only, loading, tmp_path)
        for found, notes, state, draws in results:
            assert all(torch.equal(found[name], weights[name]) for name in weights)
            assert float(state["state"][0]["step"]) == 3
            assert bool(notes) == (loading != saved and loading > 1)
            assert len(set(draws)) == loading  # no two ranks draw the same
            assert draws == results[0][3]


def sum_of_open_window(world: World, folder: Path) -> list[Tensor]:
    training = Training(world, "sgd", gradient_accumulation_steps=4)
    training.accelerator.load_state(folder)
    total = [training.accelerator.reduce(parameter.grad, "mean") for parameter in training.model.parameters()]
    training.accelerator.close()
    return total


def save_in_window(world: World, folder: Path) -> list[Tensor]:
    training = Training(world, "sgd", folder, gradient_accumulation_steps=4)
    training.micro_batches(6)
    training.accelerator.save_state()
    total = [training.accelerator.reduce(parameter.grad, "mean") for parameter in training.model.parameters()]
    training.accelerator.close()
    return total


def test_an_open_window_goes_on_with_the_same_mean_on_other_ranks(tmp_path: Path) -> None:
    expected = run_ranks(save_in_window, 2, tmp_path)[0]
    assert any(bool(part.abs().sum()) for part in expected)
    for size in (1, 2, 3):
        for found in run_ranks(sum_of_open_window, size, tmp_path):
            for ours, theirs in zip(found, expected, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


# --- a synthetic tree of shards ---

GLOBAL = torch.arange(7 * 5, dtype=torch.float32).reshape(7, 5)


def rows(rank: int, size: int) -> tuple[int, int]:
    """Shares of seven rows, uneven, the last ones empty if there are many ranks."""
    each = -(-7 // size)
    return min(7, rank * each), min(7, (rank + 1) * each)


def columns(rank: int, size: int) -> tuple[int, int]:
    return 5 * rank // size, 5 * (rank + 1) // size


def sharded_tree(world: World) -> dict[str, Any]:
    start, end = rows(world.rank, world.size)
    left, right = columns(world.rank, world.size)
    return {
        "rows": Slice(GLOBAL[start:end].clone(), (start, 0), (7, 5)),
        "columns": Slice(GLOBAL.to(torch.bfloat16)[:, left:right], (0, left), (7, 5)),
        "copies": Slice(GLOBAL[3:], (3, 0), (7, 5)) if world.rank % 2 else Slice(GLOBAL[:3], (0, 0), (7, 5)),
        "replicated": [GLOBAL.double(), torch.tensor(3.5), torch.zeros(0, 4)],
        "main": FromRankZero(torch.tensor([world.rank])),
        "number": world.rank,
    }


def save_shards(world: World, folder: Path, blocking: bool) -> None:
    saver = CheckpointSaver(comm_of(world), torch.device("cpu"))
    tree = sharded_tree(world)
    if world.size == 1:
        tree["copies"] = GLOBAL
    saver.save(LocalStore(str(folder)), "step_3", tree, FACTS, blocking=blocking)
    saver.close()


def load_shards(world: World, folder: Path) -> None:
    tree = open_checkpoint(folder, comm_of(world)).read_tree()
    start, end = rows(world.rank, world.size)
    left, right = columns(world.rank, world.size)
    for name in ("rows", "copies"):
        assert torch.equal(tree[name].read(Region((start, 0), (end - start, 5))), GLOBAL[start:end])
        assert torch.equal(tree[name].read(Region((0, left), (7, right - left))), GLOBAL[:, left:right])
    assert torch.equal(tree["columns"].read(full_region((7, 5))), GLOBAL.to(torch.bfloat16))
    values = materialize(tree)
    assert torch.equal(values["replicated"][0], GLOBAL.double())
    assert values["replicated"][1] == 3.5
    assert values["replicated"][2].shape == (0, 4)
    assert values["main"].tolist() == [0]
    assert values["number"] == 0


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("saved", [nightly(1), nightly(2), 3, nightly(4)])
def test_shards_are_cut_anew(saved: int, blocking: bool, tmp_path: Path) -> None:
    run_ranks(save_shards, saved, tmp_path, blocking)
    for loading in (1, 2, 3, 4):
        run_ranks(load_shards, loading, tmp_path)


def save_without_renames(world: World, url: str) -> None:
    saver, store = CheckpointSaver(comm_of(world), torch.device("cpu")), open_store(url)
    for value in (1.0, 2.0):
        tree = {"w": [torch.full((50,), value + n) for n in range(6)]}
        saver.save(store, "step_1", tree, FACTS, blocking=value == 1.0)
    saver.close()
    found = materialize(open_checkpoint(url, comm_of(world)).read_tree())
    assert [part[0].item() for part in found["w"]] == [2, 3, 4, 5, 6, 7]


def test_ranks_share_a_store_that_cannot_rename(tmp_path: Path) -> None:
    run_ranks(save_without_renames, 2, f"local://{tmp_path}")
    assert len(list((tmp_path / "step_1").iterdir())) == 4  # manifest, state, one file of tensors from each rank


def refuse_private_memory(world: World) -> str:
    try:
        CheckpointSaver(comm_of(world), torch.device("cpu")).save(open_store("memory://x"), "step_1", {}, FACTS)
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_store_that_ranks_do_not_share_is_refused() -> None:
    assert all("ranks cannot share it" in text for text in run_ranks(refuse_private_memory, 2))


def save_alone_first(world: World, folder: Path) -> list[str]:
    save_module.MISSING_RANKS_WARNING_S = 0.05
    said = threading.Event()
    lines: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())
            said.set()

    comm = comm_of(world)
    if world.rank == 0:
        logging.getLogger("accel_nb.checkpoint.save").addHandler(Listener())
    else:
        wait_for(lambda: (folder / "said").exists())
    reported = threading.Thread(target=lambda: said.wait(20) and (folder / "said").touch())
    reported.start()
    CheckpointSaver(comm, torch.device("cpu")).save(LocalStore(str(folder / "runs")), "step_1", {}, FACTS)
    said.set()
    reported.join()
    return lines


def test_a_rank_that_saves_alone_says_so(tmp_path: Path) -> None:
    assert "rank 0 waits for the other ranks to save step_1" in run_ranks(save_alone_first, 2, tmp_path)[0][0]


def fail_on_one(world: World, folder: Path, blocking: bool) -> list[str]:
    saver = CheckpointSaver(comm_of(world), torch.device("cpu"))
    store = LocalStore(str(folder))
    saver.save(store, "step_1", {"w": torch.ones(3)}, FACTS)
    messages = []
    bad = [
        {"w": torch.ones(3), "odd": object() if world.rank == 1 else 1},
        {"w": torch.ones(3 + world.rank)},
        {"w": Slice(torch.ones(3), (0,), (7,))},
    ]
    for tree in bad:
        try:
            saver.save(store, "step_2", tree, FACTS, blocking=blocking)
        except CheckpointError as error:
            messages.append(str(error))
    if world.rank == 1:
        store.write = _fail  # type: ignore[method-assign]
    try:
        saver.save(store, "step_3", {"w": torch.ones(300), "v": torch.ones(300)}, FACTS, blocking=blocking)
        saver.wait()
    except CheckpointError as error:
        messages.append(str(error))
    saver.save(LocalStore(str(folder)), "step_4", {"w": torch.ones(3)}, FACTS, blocking=blocking)
    saver.close()
    return messages


def _fail(*args: Any) -> None:
    raise OSError(5, "Input/output error")


@pytest.mark.parametrize("blocking", [True, False])
def test_what_fails_on_one_rank_is_raised_on_all(blocking: bool, tmp_path: Path) -> None:
    for messages in run_ranks(fail_on_one, 2, tmp_path, blocking, timeout_s=30):
        assert len(messages) == 4
        assert "rank 1: odd cannot be stored: it is a builtins.object" in messages[0]
        assert "rank 1 holds other tensors than rank 0" in messages[1]
        assert "do not cover its global shape [7]" in messages[2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_1", "step_4"]


def save_on_main_only(world: World, folder: Path) -> None:
    accelerator = Accelerator(world=world, cpu=True)
    model = accelerator.prepare(nn.Linear(2, 2))
    if accelerator.is_main_process:
        accelerator.save(accelerator.get_state_dict(model), folder / "weights.bin")
        accelerator.save_model(model, folder)
    accelerator.wait_for_everyone()
    accelerator.close()


def test_the_main_rank_may_write_files_of_its_own_alone(tmp_path: Path) -> None:
    run_ranks(save_on_main_only, 2, tmp_path, timeout_s=30)
    weights = torch.load(tmp_path / "weights.bin", weights_only=True)
    assert torch.equal(load_file(tmp_path / "model.safetensors")["weight"], weights["weight"])
