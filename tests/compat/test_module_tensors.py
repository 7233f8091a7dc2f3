"""Single tensors of modules, and files of weights, under the other package's names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel_nb.compat.models.align_hooks import attach_execution_device_hook
from accel_nb.compat.models.big_models import cpu_offload, load_checkpoint_and_dispatch, load_checkpoint_in_model
from accel_nb.compat.models.model_parts import clean_state_dict_for_safetensors
from accel_nb.compat.models.module_tensors import (
    align_module_device,
    has_offloaded_params,
    set_module_tensor_to_device,
)
from accel_nb.compat.models.offloaded_files import get_state_dict_offloaded_model
from accel_nb.compat.models.weight_files import save_with_torch


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(3, 2), nn.LayerNorm(2), nn.Linear(2, 3, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Any) -> Any:
        return self.head(self.norm(self.embed(tokens)))


def test_a_tensor_that_is_on_the_device_stays_the_same_object() -> None:
    model = Tied()
    weight = model.embed.weight
    set_module_tensor_to_device(model, "embed.weight", "cpu")
    with align_module_device(model.head, "cpu"):
        assert model.head.weight is weight
    attach_execution_device_hook(model, "cpu")
    assert model.embed.weight is model.head.weight is weight


class Scaled(nn.Module):
    """A model with weights of its own beside those of its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.part = nn.Parameter(torch.full((2,), 3.0)), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(x * self.scale)


def test_weights_of_the_model_itself_are_read_where_all_are_offloaded(tmp_path: Path) -> None:
    model, given = Scaled(), torch.ones(1, 2)
    expected, state = model(given), {name: value.clone() for name, value in model.state_dict().items()}
    cpu_offload(model, "cpu")
    assert torch.equal(model(given), expected)
    assert has_offloaded_params(model)
    found = get_state_dict_offloaded_model(model)
    assert found.keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in found.items())
    with align_module_device(model):
        assert model.scale.tolist() == [3, 3]
    assert model.scale.is_meta


@pytest.mark.parametrize(
    ("name", "value", "dtype", "expected"),
    [
        ("num_batches_tracked", torch.tensor(3), torch.float16, torch.int64),
        ("num_batches_tracked", torch.tensor(3.0), None, torch.int64),
        ("weight", torch.ones(2, dtype=torch.int8), None, torch.float32),
        ("weight", torch.ones(2), "float16", torch.float16),
        ("weight", None, torch.float16, torch.float16),
    ],
)
def test_values_get_the_dtype_of_the_tensor_or_that_of_floats(name: str, value: Any, dtype: Any, expected: Any) -> None:
    module: Any = nn.BatchNorm1d(2)
    set_module_tensor_to_device(module, name, "cpu", value, dtype)
    assert getattr(module, name).dtype == expected


@pytest.mark.parametrize("missing", ["embed.weight", "head.weight"])
@pytest.mark.parametrize(
    "places",
    [{"": "cpu"}, {"embed": "cpu", "norm": "disk", "head": "cpu"}, {"embed": "disk", "norm": "cpu", "head": "disk"}],
)
def test_a_tied_weight_is_loaded_from_either_of_its_names(tmp_path: Path, missing: str, places: Any) -> None:
    saved = Tied()
    torch.save({name: value for name, value in saved.state_dict().items() if name != missing}, tmp_path / "model.bin")
    model = load_checkpoint_and_dispatch(Tied(), tmp_path / "model.bin", places, offload_folder=tmp_path / "offloaded")
    tokens = torch.tensor([0, 2])
    torch.testing.assert_close(model(tokens), saved(tokens))


def test_tied_weights_stay_tied_and_counts_are_whole_numbers(tmp_path: Path) -> None:
    model, tied = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), Tied()
    torch.save(model.state_dict(), tmp_path / "model.bin")
    load_checkpoint_in_model(model, tmp_path / "model.bin", dtype=torch.float16, keep_in_fp32_modules=["1"])
    dtypes = {name: value.dtype for name, value in model.state_dict().items()}
    assert dtypes["0.weight"] == torch.float16
    assert (dtypes["1.weight"], dtypes["1.num_batches_tracked"]) == (torch.float32, torch.int64)
    torch.save(tied.state_dict(), tmp_path / "tied.bin")
    load_checkpoint_in_model(tied, tmp_path / "tied.bin")
    assert tied.head.weight is tied.embed.weight


def test_only_weights_are_loaded_from_a_folder_of_a_training(tmp_path: Path) -> None:
    saved, model = nn.Linear(2, 2), nn.Linear(2, 2)
    torch.save(saved.state_dict(), tmp_path / "pytorch_model.bin")
    torch.save({"weight": torch.zeros(2, 2)}, tmp_path / "scheduler.pt")
    torch.save(saved, tmp_path / "training_args.bin")
    load_checkpoint_in_model(model, tmp_path)
    assert torch.equal(model.weight, saved.weight)


def test_files_of_an_earlier_save_are_removed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    state = {"a": torch.ones(4), "b": torch.zeros(4)}
    save_with_torch(state, tmp_path, "1GB", writes=True)
    save_with_torch({"a": -state["a"], "b": state["b"]}, tmp_path, 16, writes=True)
    shards = [f"pytorch_model-0000{number}-of-00002.bin" for number in (1, 2)]
    index = "pytorch_model.bin.index.json"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", *shards, index]
    assert json.loads((tmp_path / index).read_text())["weight_map"] == dict(zip("ab", shards, strict=True))
    assert torch.load(tmp_path / shards[0], weights_only=True)["a"].eq(-1).all()
    save_with_torch(state, tmp_path, "1GB", writes=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "pytorch_model.bin"]


def test_parts_of_one_memory_are_kept_and_only_names_of_one_tensor_are_left_out() -> None:
    memory = torch.arange(8.0)
    cleaned = clean_state_dict_for_safetensors({"a": memory[:4], "b": memory[4:], "c": memory[:4], "d": "text"})
    assert {name: value if name == "d" else value.tolist() for name, value in cleaned.items()} == {
        "a": [0, 1, 2, 3], "b": [4, 5, 6, 7], "d": "text"
    }  # fmt: skip
    assert cleaned["b"].untyped_storage().data_ptr() != cleaned["a"].untyped_storage().data_ptr()
