"""Folders of torch.distributed.checkpoint: merged into one file, and never unpickled beyond DCP's own records."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save as save_shards

from accel_nb.checkpoint.convert import merge
from accel_nb.checkpoint.dcp_format import open_dcp_weights
from accel_nb.cli import main
from accel_nb.errors import CheckpointError, CorruptCheckpoint

FILE = "__0_0.distcp"

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1).bfloat16())


def save(folder: Path, content: dict[str, Any]) -> Path:
    save_shards(content, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save(tmp_path / "pytorch_model_fsdp_0", {"model": make_model().state_dict()})


def assert_are_weights(found: dict[str, torch.Tensor]) -> None:
    expected = make_model().state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0)


@pytest.mark.parametrize("nesting", ["model", "other", None])
def test_a_folder_is_merged_with_the_names_of_the_model(nesting: str | None, tmp_path: Path) -> None:
    weights = make_model().state_dict()
    folder = save(tmp_path / "shards", weights if nesting is None else {nesting: weights})
    assert merge(folder, tmp_path / "out") == (len(weights), ())
    assert_are_weights(load_file(tmp_path / "out" / "model.safetensors"))


def test_accelerates_command_line_merges_and_removes_the_shards(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["merge-weights", str(saved), str(out), "--unsafe_serialization"]) == 0
    assert_are_weights(torch.load(out / "pytorch_model.bin", weights_only=True))
    (saved / "config.json").write_text("{}")
    assert main(["merge-weights", str(saved), str(out), "--remove_checkpoint_dir"]) == 0
    assert f"wrote 9 tensors to {out}/model.safetensors\n" in capsys.readouterr().out
    assert_are_weights(load_file(out / "model.safetensors"))
    assert os.listdir(saved) == ["config.json"]


def test_an_error_leaves_no_pickled_weights(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_some(_: Any, path: Path) -> None:
        path.write_bytes(b"some")
        raise OSError("no space")

    monkeypatch.setattr(torch, "save", write_some)
    with pytest.raises(OSError, match="no space"):
        merge(saved, tmp_path / "out", as_safetensors=False)
    assert os.listdir(tmp_path / "out") == []


def test_a_second_model_is_no_part_of_such_a_folder(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no model 1"):
        merge(saved, tmp_path / "out", model=1)


def test_the_command_for_checkpoints_merges_them_in_several_files(saved: Path, tmp_path: Path) -> None:
    words = ["checkpoint", "merge", str(saved), "--out", str(tmp_path / "out"), "--max-shard-size", "1KB"]
    assert main(words) == 0
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_of_several_objects_the_model_is_merged_and_the_others_are_named(tmp_path: Path) -> None:
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters())
    content = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
    merged = merge(save(tmp_path / "shards", content), tmp_path / "out")
    assert merged.num_tensors == 9
    assert "epoch" in merged.left_out
    assert_are_weights(load_file(tmp_path / "out" / "model.safetensors"))


def test_a_folder_without_the_weights_of_a_model_is_refused(saved: Path, tmp_path: Path) -> None:
    state = {"optimizer": {"state": {"0.weight": {"exp_avg": torch.ones(2)}}}}
    for folder, message in (
        (save(tmp_path / "optimizer_0", state), "an optimizer's state cannot be merged"),
        (save(tmp_path / "values", {"a": {"b": 1}}), "it holds no tensors"),
        (saved.parent, "there is no"),
        (tmp_path / "absent", "there is no"),
    ):
        with pytest.raises(CheckpointError, match=message):
            merge(folder, tmp_path / "out")
    with pytest.raises(CheckpointError, match=f"give {saved}, which has one"):
        open_dcp_weights(saved.parent)
    with pytest.raises(CheckpointError, match="to remove"):
        merge(tmp_path, tmp_path / "out", removes_shards=True)
    assert not (tmp_path / "out").exists()


class Attack:
    """Creates a folder when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.target),)


def change_metadata(folder: Path, change: Callable[[Any], object]) -> None:
    file = folder / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    change(metadata)
    file.write_bytes(pickle.dumps(metadata))


def change_places(**values: Any) -> Callable[[Any], object]:
    return lambda metadata: [vars(place).update(values) for place in metadata.storage_data.values()]


@pytest.mark.parametrize("is_in_metadata", [True, False])
def test_nothing_else_is_unpickled(is_in_metadata: bool, saved: Path, tmp_path: Path) -> None:
    attack = Attack(tmp_path / "attacked")
    if is_in_metadata:
        change_metadata(saved, lambda metadata: metadata.planner_data.update({"0.weight": attack}))
    else:
        torch.save(attack, saved / FILE)
        length = (saved / FILE).stat().st_size
        change_metadata(saved, change_places(offset=0, length=length))
    with pytest.raises(CorruptCheckpoint, match="mkdir") as refused:
        merge(saved, tmp_path / "out")
    assert "weights_only" not in str(refused.value)
    assert not (tmp_path / "attacked").exists()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (change_places(relative_path="../secret"), "is not in the folder"),
        (change_places(relative_path="__7_0.distcp"), "No such file"),
        (change_places(length=10), "does not hold the chunk"),
        (change_places(offset=10**6), "does not hold the chunk"),
        (change_places(offset=-1), "does not hold the chunk"),
        (change_places(offset=None), "does not place the tensors"),
        (change_places(transform_descriptors=["zstd"]), "was written with an extension"),
        (lambda metadata: metadata.storage_data.clear(), "does not place the tensors"),
        (lambda metadata: metadata.state_dict_metadata["model.0.weight"].chunks.clear(), "do not make one whole"),
        (lambda metadata: vars(metadata).update(storage_data=None), "does not place the tensors"),
    ],
)
def test_damage_is_refused_by_the_name_of_the_file(
    change: Callable[[Any], object], message: str, saved: Path, tmp_path: Path
) -> None:
    change_metadata(saved, change)
    with pytest.raises(CheckpointError, match=message):
        merge(saved, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_chunk_that_differs_from_the_metadata_is_refused(saved: Path, tmp_path: Path) -> None:
    first, second = (f"model.0.{name}" for name in ("weight", "bias"))

    def exchange(metadata: Any) -> None:
        places = {index.fqn: place for index, place in metadata.storage_data.items()}
        own, other = vars(places[first]), vars(places[second])
        places[first].offset, places[first].length = other["offset"], other["length"]
        assert own["offset"] == other["offset"]

    change_metadata(saved, exchange)
    with pytest.raises(CorruptCheckpoint, match=r"is not what \.metadata says"):
        merge(saved, tmp_path / "out")
