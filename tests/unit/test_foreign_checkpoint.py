"""Folders that accelerate's ``save_state`` has written go on here; nothing in them can run code."""

from __future__ import annotations

import json
import os
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from accel_nb.accelerator import Accelerator
from accel_nb.errors import CheckpointError, NoCheckpoint
from accel_nb.runtime.world import World
from tests.support.checkpoints import save_sharded


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.embedding(tokens)))


class Counter:
    def __init__(self) -> None:
        self.state: dict[str, Any] = {"count": 0, "names": ["a"], "mean": torch.zeros(2)}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def parts() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return model, optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=40)


def steps(accelerator: Any, model: Any, optimizer: Any, scheduler: Any, num_steps: int) -> None:
    for _ in range(num_steps):
        tokens = torch.randint(0, 7, (6,))
        loss = nn.functional.cross_entropy(model(tokens + random.randrange(1) + np.random.randint(1)), tokens)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


@pytest.fixture
def theirs(tmp_path: Path) -> tuple[Path, list[Tensor]]:
    """Save with accelerate after 5 steps, and return the folder and the weights after 9."""
    return save_with_accelerate(tmp_path / "theirs", safe=True)


def save_with_accelerate(folder: Path, *, safe: bool) -> tuple[Path, list[Tensor]]:
    import accelerate  # here, since other tests put something else in its place

    before = dict(os.environ)
    try:
        accelerator = accelerate.Accelerator(cpu=True)
        model, optimizer, scheduler = accelerator.prepare(*parts())
        counter = Counter()
        counter.state = {"count": 3, "names": ["b"], "mean": torch.ones(2)}
        accelerator.register_for_checkpointing(counter)
        steps(accelerator, model, optimizer, scheduler, 5)
        accelerator.save_state(str(folder), safe_serialization=safe)
        steps(accelerator, model, optimizer, scheduler, 4)
        accelerator.end_training()
        return folder, [value.clone() for value in model.state_dict().values()]
    finally:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerate.state.GradientState._reset_state()
        os.environ.clear()
        os.environ.update(before)


def ours(**options: Any) -> tuple[Accelerator, Any, Any, Any, Counter]:
    accelerator = Accelerator(world=World(), cpu=True, **options)
    model, optimizer, scheduler = accelerator.prepare(*parts())
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    return accelerator, model, optimizer, scheduler, counter


@pytest.mark.parametrize("safe", [True, False])
def test_training_goes_on_to_the_bit(tmp_path: Path, safe: bool) -> None:
    folder, whole = save_with_accelerate(tmp_path / "theirs", safe=safe)
    assert (folder / ("model.safetensors" if safe else "pytorch_model.bin")).exists()
    accelerator, model, optimizer, scheduler, counter = ours()
    report = accelerator.load_state(folder, layout="accelerate")
    assert (report.step, report.saved_world_size, report.notes) == (5, 1, ())
    assert counter.state["count"] == 3
    assert torch.equal(counter.state["mean"], torch.ones(2))
    steps(accelerator, model, optimizer, scheduler, 4)
    assert all(torch.equal(a, b) for a, b in zip(whole, model.state_dict().values(), strict=True))
    assert accelerator.save_state(tmp_path / "own")
    accelerator.close()


def test_sharded_weights_are_read(theirs: tuple[Path, list[Tensor]], tmp_path: Path) -> None:
    folder, _ = theirs
    accelerator, model, *_ = ours()
    accelerator.load_state(folder, layout="accelerate")
    wanted = [value.clone() for value in model.state_dict().values()]
    accelerator.close()
    (folder / "model.safetensors").unlink()
    save_sharded(model, folder, 2)
    accelerator, model, *_ = ours()
    accelerator.load_state(folder, layout="accelerate")
    assert all(torch.equal(a, b) for a, b in zip(wanted, model.state_dict().values(), strict=True))
    accelerator.close()


def test_it_is_read_only_by_explicit_wish(theirs: tuple[Path, list[Tensor]]) -> None:
    accelerator, *_ = ours()
    with pytest.raises(NoCheckpoint, match="layout='accelerate'"):
        accelerator.load_state(theirs[0])
    with pytest.raises(CheckpointError, match=r"neither optimizer\.bin"):
        accelerator.load_state(theirs[0].parent, layout="accelerate")
    accelerator.close()


def test_random_states_of_gpus_that_are_not_read_are_noted(theirs: tuple[Path, list[Tensor]]) -> None:
    file = theirs[0] / "random_states_0.pkl"
    content = torch.load(file, weights_only=False)
    torch.save({**content, "torch_cuda_manual_seed": [torch.zeros(16, dtype=torch.uint8)]}, file)
    accelerator, *_ = ours()
    report = accelerator.load_state(theirs[0], layout="accelerate")
    assert ["random states of GPUs were not read" in note for note in report.notes] == [True]
    accelerator.close()


def test_nothing_is_loaded_unless_all_fits(theirs: tuple[Path, list[Tensor]]) -> None:
    accelerator = Accelerator(world=World(), cpu=True)
    model, optimizer = nn.Linear(2, 2), torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    accelerator.prepare(model, optimizer)
    before = model.weight.detach().clone()
    with pytest.raises(CheckpointError, match=r"it lacks tensors of the model: weight, bias") as caught:
        accelerator.load_state(theirs[0], layout="accelerate")
    assert "it holds 1 schedulers, and 0 are prepared" in str(caught.value)
    assert torch.equal(model.weight, before)
    report = accelerator.load_state(theirs[0], layout="accelerate", strict=False)
    assert any("holds 1 registered objects" in note for note in report.notes)
    accelerator.close()


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("ran",)


def pickled(path: Path) -> None:
    path.write_bytes(pickle.dumps({"state": Evil(), "param_groups": []}))


def saved(path: Path) -> None:
    torch.save({"state": Evil(), "param_groups": []}, path)


def link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.bin", "scheduler.bin", "random_states_0.pkl"])
@pytest.mark.parametrize(
    "damage", [pickled, saved, link, lambda path: path.write_bytes(path.read_bytes()[:-100]), Path.touch]
)
def test_damaged_and_hostile_files_are_refused_by_name(
    theirs: tuple[Path, list[Tensor]], name: str, damage: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    path = theirs[0] / name
    if damage is Path.touch:
        path.write_bytes(b"")
    else:
        damage(path)
    accelerator, model, *_ = ours()
    before = [value.clone() for value in model.state_dict().values()]
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        accelerator.load_state(theirs[0], layout="accelerate")
    assert not (tmp_path / "ran").exists()
    assert all(torch.equal(a, b) for a, b in zip(before, model.state_dict().values(), strict=True))
    accelerator.close()


@pytest.mark.parametrize("target", ["../../etc/passwd", "/etc/passwd", "a\0b"])
def test_an_index_cannot_lead_elsewhere(theirs: tuple[Path, list[Tensor]], target: str) -> None:
    (theirs[0] / "model.safetensors").unlink()
    for name in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        path = theirs[0] / name
        path.write_text(json.dumps({"metadata": {}, "weight_map": {"head.weight": target}}))
        accelerator, *_ = ours()
        with pytest.raises(CheckpointError):
            accelerator.load_state(theirs[0], layout="accelerate")
        accelerator.close()
        path.unlink()
