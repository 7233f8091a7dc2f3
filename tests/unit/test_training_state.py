"""Saving and loading through the accelerator in one process."""

from __future__ import annotations

import json
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from accel_nb.accelerator import Accelerator
from accel_nb.checkpoint import export
from accel_nb.checkpoint.export import WeightWriter
from accel_nb.errors import CheckpointError, ConfigError, CorruptCheckpoint, MisuseError, NoCheckpoint


def prepared(folder: Path | None = None, sizes: tuple[int, int] = (2, 3), **options: Any) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = nn.Linear(*sizes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    config = {"checkpoint": {"dir": str(folder), **options}} if folder else None
    accelerator = Accelerator(cpu=True, config=config)
    accelerator.prepare(model, optimizer)
    return accelerator, model, optimizer


def train(accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    for _ in range(steps):
        accelerator.backward(model(torch.randn(4, model.in_features)).square().mean())  # type: ignore[arg-type]
        optimizer.step()
        optimizer.zero_grad()


class Counter:
    def __init__(self) -> None:
        self.state: dict[Any, Any] = {"seen": 0, "best": torch.zeros(2)}

    def state_dict(self) -> dict[Any, Any]:
        return self.state

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        self.state = state


@pytest.mark.parametrize("blocking", [True, False])
def test_names_and_limit_are_automatic(tmp_path: Path, blocking: bool) -> None:
    accelerator, model, optimizer = prepared(tmp_path, total_limit=2)
    for _ in range(4):
        train(accelerator, model, optimizer)
        accelerator.save_state(blocking=blocking)
    accelerator.wait_for_checkpoint()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_3", "step_4"]
    assert (tmp_path / "latest").read_text() == "step_4\n"
    with pytest.raises(NoCheckpoint, match="its parent folder has step_4, step_3"):
        accelerator.load_state(tmp_path / "checkpoint_3")  # what the other package would have called it
    before = model.weight.detach().clone()
    train(accelerator, model, optimizer, 3)
    report = accelerator.load_state()
    assert (report.step, report.notes) == (4, ())
    assert torch.equal(model.weight, before)
    train(accelerator, model, optimizer)
    assert accelerator.save_state().endswith("step_5")
    accelerator.close()


def test_a_folder_of_ones_own_and_no_folder_at_all(tmp_path: Path) -> None:
    accelerator, *_ = prepared()
    with pytest.raises(MisuseError, match=r"save_state\(\) needs a folder"):
        accelerator.save_state()
    with pytest.raises(MisuseError, match=r"load_state\(\) needs a folder"):
        accelerator.load_state()
    with pytest.raises(NoCheckpoint, match="no complete checkpoint"):
        accelerator.load_state(tmp_path)
    for _ in range(2):
        assert accelerator.save_state(tmp_path / "best") == str(tmp_path / "best")
    assert [path.name for path in tmp_path.iterdir()] == ["best"]
    again, *_ = prepared()  # the cell is run again
    again.save_state(tmp_path / "best")
    again.close()
    assert accelerator.load_state(tmp_path / "best").step == 0
    accelerator.close()


def test_registered_objects_travel_and_others_are_named(tmp_path: Path) -> None:
    accelerator, *_ = prepared(tmp_path)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    counter.state = {"seen": 7, 3: (None, float("inf")), "best": torch.ones(2)}
    accelerator.save_state()
    counter.state = {}
    accelerator.load_state()
    assert (counter.state["seen"], counter.state[3]) == (7, (None, float("inf")))
    counter.state["best"] += 1  # is its own memory
    counter.state = {"odd": print}
    with pytest.raises(CheckpointError, match="registered/0/odd cannot be stored"):
        accelerator.save_state()
    with pytest.raises(MisuseError, match="no state_dict and no load_state_dict"):
        accelerator.register_for_checkpointing(object())
    accelerator.close()


def test_nothing_is_loaded_unless_all_fits(tmp_path: Path) -> None:
    accelerator, model, optimizer = prepared(tmp_path)
    train(accelerator, model, optimizer)
    accelerator.save_state()
    accelerator.close()
    accelerator, model, _ = prepared(tmp_path, sizes=(2, 4))
    accelerator.register_for_checkpointing(Counter())
    before = model.weight.detach().clone()
    with pytest.raises(CheckpointError) as caught:
        accelerator.load_state()
    for part in (
        "weight ([3, 2] instead of [4, 2])",
        "bias ([3]",
        "0 registered objects, and there are 1",
        "strict=False",
    ):
        assert part in str(caught.value)
    assert torch.equal(model.weight, before)
    report = accelerator.load_state(strict=False)
    assert len(report.notes) == 2
    assert torch.equal(model.weight, before)
    accelerator.close()


def test_a_damaged_newest_one_is_passed_over_loudly(tmp_path: Path) -> None:
    accelerator, model, optimizer = prepared(tmp_path)
    for _ in range(2):
        train(accelerator, model, optimizer)
        accelerator.save_state()
    (tmp_path / "step_2" / "state.json").write_bytes(b"{}")
    with pytest.warns(UserWarning, match=r"step_2/state\.json"):
        report = accelerator.load_state()
    assert report.step == 1
    with pytest.raises(CorruptCheckpoint, match=r"state\.json"):
        accelerator.load_state(tmp_path / "step_2")
    accelerator.close()


def test_hooks_see_models_and_can_be_removed(tmp_path: Path) -> None:
    accelerator, model, _ = prepared(tmp_path)
    seen: list[Any] = []
    handles = [
        accelerator.register_save_state_pre_hook(
            lambda models, weights, url: seen.append((models, list(weights), url))
        ),
        accelerator.register_load_state_pre_hook(lambda models, url: seen.append((models, url))),
    ]
    url = accelerator.save_state()
    accelerator.load_state()
    assert seen[0][0] == [model]
    assert set(seen[0][1][0]) == {"weight", "bias"}
    assert seen[1] == ([model], url)
    for handle in handles:
        handle.remove()
        handle.remove()
    accelerator.save_state()
    assert len(seen) == 2
    accelerator.close()


def test_hooks_whose_handles_nobody_keeps_are_all_called(tmp_path: Path) -> None:
    accelerator, *_ = prepared(tmp_path)
    seen: list[str] = []
    for name in "ab":
        accelerator.register_save_state_pre_hook(lambda models, weights, url, name=name: seen.append(f"save {name}"))
        accelerator.register_load_state_pre_hook(lambda models, url, name=name: seen.append(f"load {name}"))
    accelerator.save_state()
    accelerator.load_state()
    assert seen == ["save a", "save b", "load a", "load b"]
    accelerator.close()


@pytest.mark.parametrize("blocking", [True, False])
def test_what_hooks_write_becomes_part_of_the_checkpoint(tmp_path: Path, blocking: bool) -> None:
    accelerator, model, optimizer = prepared()
    found: list[str] = []

    def save(models: list[nn.Module], weights: list[Any], folder: str) -> None:
        (Path(folder) / "part").mkdir()
        (Path(folder) / "part" / "bias").write_text(str(models[0].bias.sum().item()))  # type: ignore[union-attr]
        weights.pop()

    def load(models: list[nn.Module], folder: str) -> None:
        found.append((Path(folder) / "part" / "bias").read_text())
        models.pop()

    handle = accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    for _ in range(2):  # the second one replaces the first
        train(accelerator, model, optimizer)
        accelerator.save_state(tmp_path / "last", blocking=blocking)
    accelerator.load_state(tmp_path / "last")
    assert found == [str(model.bias.sum().item())]

    handle.remove()
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: [][0])
    with pytest.raises(IndexError):
        accelerator.save_state(tmp_path / "other")
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["last"]
    accelerator.close()


def test_hooks_may_take_models_out(tmp_path: Path) -> None:
    accelerator, model, _ = prepared(tmp_path)
    accelerator.register_save_state_pre_hook(lambda models, weights, url: weights.clear())
    accelerator.register_load_state_pre_hook(lambda models, url: models.clear())
    accelerator.save_state()
    with torch.no_grad():
        model.weight.fill_(5)
    accelerator.load_state()
    assert set(model.weight.flatten().tolist()) == {5.0}
    accelerator.close()


def test_a_failed_background_save_is_raised_by_the_next_call(tmp_path: Path) -> None:
    accelerator, *_ = prepared()
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="was not saved"):
        accelerator.save_state(tmp_path / "file" / "step_1", blocking=False)
    accelerator.save_state(tmp_path / "good", blocking=False)
    accelerator.components.state._saver._job.join()  # type: ignore[union-attr]
    accelerator.components.state._saver._job._problem = "the disk is gone"  # type: ignore[union-attr]
    with pytest.raises(CheckpointError, match="the disk is gone"):
        accelerator.wait_for_checkpoint()
    accelerator.wait_for_checkpoint()
    accelerator.close()


def test_a_failed_background_save_is_not_reported_as_saved(tmp_path: Path) -> None:
    accelerator, model, optimizer = prepared(tmp_path)
    train(accelerator, model, optimizer)
    accelerator.save_state(blocking=False)
    accelerator.components.state._saver._job.join()  # type: ignore[union-attr]
    accelerator.components.state._saver._job._problem = "the disk is gone"  # type: ignore[union-attr]
    with pytest.raises(CheckpointError, match="the disk is gone"):
        accelerator.wait_for_checkpoint()
    train(accelerator, model, optimizer)
    accelerator.save_state(blocking=False)
    [line] = accelerator.end_run()
    assert line.startswith("saved step 2 (1) in ")
    accelerator.close()


def test_lines_about_saves_have_no_credentials() -> None:
    model = nn.Linear(2, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerator = Accelerator(cpu=True, config={"checkpoint": {"dir": "memory://user:hunter2hunter2@box/run"}})
    accelerator.prepare(model, optimizer)
    train(accelerator, model, optimizer)
    accelerator.save_state()
    [line] = accelerator.end_run()
    assert "hunter2" not in line
    assert line.startswith("saved step 1 (1) in memory://")
    accelerator.close()


def test_weights_are_written_for_other_libraries(tmp_path: Path) -> None:
    accelerator, *_ = prepared()
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8, bias=False))
    model[2].weight = model[0].weight
    accelerator.prepare(model)
    accelerator.save_model(model, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert set(load_file(tmp_path / "model.safetensors")) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    accelerator.save_model(model, tmp_path, max_shard_size=300)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *sorted(set(index["weight_map"].values())), "model.safetensors.index.json",
    ]  # fmt: skip
    assert index["metadata"]["total_size"] == 2 * (64 + 8) * 4
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / file)[name], model.state_dict()[name])
    with pytest.raises(ConfigError, match="max_shard_size is big"):
        accelerator.save_model(model, tmp_path, max_shard_size="big")
    with pytest.raises(MisuseError, match=r"safe_serialization=False.*pickles.*torch\.save"):
        accelerator.save_model(model, tmp_path, safe_serialization=False)
    found = accelerator.get_state_dict(model, unwrap=False)
    assert torch.equal(found["0.weight"], model[0].weight)
    assert found["0.weight"].data_ptr() != model[0].weight.data_ptr()
    accelerator.close()


def test_weights_of_one_file_are_held_at_a_time(tmp_path: Path) -> None:
    living: list[weakref.ref[torch.Tensor]] = []
    most = 0
    files = WeightWriter(tmp_path, 1000, torch.bfloat16)
    for number in range(20):
        value = torch.full((100,), 1 + number / 3)
        files.add(f"w{number}", value)
        living.append(weakref.ref(files._shard[f"w{number}"]))
        most = max(most, sum(held() is not None for held in living))
    assert most == 5  # of 200 bytes each
    assert not list(tmp_path.glob("*.safetensors"))
    files.finish()
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 20 * 200
    for number in range(20):
        found = load_file(tmp_path / index["weight_map"][f"w{number}"])[f"w{number}"]
        assert torch.equal(found, torch.full((100,), 1 + number / 3).bfloat16())

    spoilt = WeightWriter(tmp_path, 1000)
    for name, value in {"a": torch.ones(300), "b": 3, "c": torch.ones(2)}.items():
        spoilt.add(name, value)
    with pytest.raises(CheckpointError, match="b: only tensors"):
        spoilt.finish()
    assert json.loads((tmp_path / "model.safetensors.index.json").read_text()) == index
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".tmp")]


def test_views_of_complex_numbers_are_written_by_value(tmp_path: Path) -> None:
    pair, files = torch.tensor([1 + 2j, 3 + 4j], dtype=torch.complex64), WeightWriter(tmp_path, "1GB")
    files.add("conjugated", pair.conj())
    files.add("negative", pair.conj().imag)
    files.finish()
    found = load_file(tmp_path / "model.safetensors")
    assert found["conjugated"].tolist() == [1 - 2j, 3 - 4j]
    assert found["negative"].tolist() == [-2, -4]


def test_a_last_file_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(tensors: object, path: Path, metadata: object) -> None:
        path.write_bytes(b"a part")
        raise OSError("No space left on device")

    monkeypatch.setattr(export, "save_file", fail)
    files = WeightWriter(tmp_path, "1GB")
    files.add("w", torch.ones(2))
    with pytest.raises(OSError, match="No space left"):
        files.finish()
    assert not list(tmp_path.iterdir())


def test_plain_values_are_saved_and_others_refused(tmp_path: Path) -> None:
    accelerator, *_ = prepared()
    accelerator.save({"w": torch.ones(2)}, tmp_path / "a.safetensors")
    accelerator.save({"step": 3, "rate": 0.1}, tmp_path / "b.json")
    accelerator.save({"w": torch.ones(2), "step": 3}, tmp_path / "c.pt")
    accelerator.save({"w": torch.ones(2)}, tmp_path / "c.bin", safe_serialization=True)
    assert load_file(tmp_path / "c.bin")["w"].tolist() == [1, 1]
    assert load_file(tmp_path / "a.safetensors")["w"].tolist() == [1, 1]
    assert json.loads((tmp_path / "b.json").read_text()) == {"step": 3, "rate": 0.1}
    assert torch.load(tmp_path / "c.pt", weights_only=True)["step"] == 3
    with pytest.raises(CheckpointError, match="model cannot be stored"):
        accelerator.save({"model": nn.Linear(1, 1)}, tmp_path / "d.pt")
    with pytest.raises(CheckpointError, match="a dict of tensors"):
        accelerator.save({"step": 3}, tmp_path / "e.safetensors")
    with pytest.raises(CheckpointError, match="w is a tensor"):
        accelerator.save({"w": torch.ones(2)}, tmp_path / "f.json")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.safetensors", "b.json", "c.bin", "c.pt"]
    accelerator.close()


def test_a_url_works_as_a_folder_does(tmp_path: Path) -> None:
    accelerator, model, optimizer = prepared()
    train(accelerator, model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        url = accelerator.save_state(f"memory://{tmp_path.name}/best", blocking=False)
        accelerator.wait_for_checkpoint()
        assert accelerator.load_state(url).step == 1
    accelerator.close()
