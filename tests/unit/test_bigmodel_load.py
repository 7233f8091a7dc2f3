"""Reading checkpoints: every dtype, every layout of files, and everything that is refused."""

from __future__ import annotations

import errno
import json
import mmap
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.overrides import TorchFunctionMode

from accel_nb.bigmodel import host_memory
from accel_nb.bigmodel.loading.load import load_checkpoint_in_model
from accel_nb.bigmodel.loading.tensor_filling import Staging
from accel_nb.bigmodel.meta import init_empty_weights
from accel_nb.bigmodel.safetensors_reader import DTYPES, open_safetensors
from accel_nb.errors import ConfigError
from accel_nb.runtime.devices.registry import device_type
from tests.support.checkpoints import save_sharded, save_single, save_zeros
from tests.support.memory import grown_bytes
from tests.support.transformer import Transformer


def empty(**options) -> Transformer:
    with init_empty_weights():
        return Transformer(**options)


def assert_same(model: nn.Module, expected: nn.Module) -> None:
    for name, tensor in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


@pytest.mark.parametrize("save", [save_single, save_sharded])
@pytest.mark.parametrize("give_folder", [True, False])
def test_a_model_is_loaded_bit_by_bit_and_stays_tied(tmp_path: Path, save, give_folder: bool) -> None:
    expected = Transformer()
    path = save(expected, tmp_path)
    model = empty()

    loaded = load_checkpoint_in_model(model, tmp_path if give_folder else path, {"": "cpu"}, strict=True)

    assert_same(model, expected)
    assert model.head.weight is model.embedding.weight
    assert (loaded.missing, loaded.unexpected, loaded.on_disk) == ([], [], {})


def test_a_model_with_values_is_filled_in_place(tmp_path: Path) -> None:
    expected, model = Transformer(), Transformer()
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    load_checkpoint_in_model(model, save_single(expected, tmp_path))
    assert_same(model, expected)
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before


def test_a_device_without_or_with_its_number_is_that_of_the_tensors(tmp_path: Path) -> None:
    expected, model = Transformer(), Transformer()
    load_checkpoint_in_model(model, save_single(expected, tmp_path), {"": "cpu:0"})
    assert_same(model, expected)


def test_kernels_without_huge_pages_have_ordinary_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    class Region(mmap.mmap):
        def madvise(self, *_: int) -> None:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(host_memory.mmap, "mmap", Region)
    (made,) = host_memory.empty_tensors([((1 << 20,), torch.float32)])
    assert made.fill_(1).sum() == 1 << 20


def test_dtypes_are_converted_on_the_way_and_some_modules_left(tmp_path: Path) -> None:
    expected = Transformer(width=64)
    path = save_single(expected, tmp_path)
    model = empty(width=64)
    load_checkpoint_in_model(model, path, dtype="bfloat16", keep_in_fp32_modules=["norm"])
    assert torch.equal(model.blocks[0].up.weight, expected.blocks[0].up.weight.bfloat16())
    assert torch.equal(model.blocks[0].norm.weight, expected.blocks[0].norm.weight)
    assert model.norm.weight.dtype == torch.float32


def test_conversion_happens_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel_nb.bigmodel.safetensors_reader.CHUNK_BYTES", 100)
    expected = Transformer()
    model = empty()
    load_checkpoint_in_model(model, save_single(expected, tmp_path), dtype=torch.float64)
    assert_same(model, expected.double())


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_dtype_is_read(tmp_path: Path, name: str) -> None:
    tensor = torch.arange(12).reshape(3, 4).to(DTYPES[name])
    save_file({"t": tensor, "empty": tensor[:0], "scalar": tensor[0, 1].clone()}, tmp_path / "a.safetensors")
    for source in open_safetensors(tmp_path / "a.safetensors").tensors.values():
        out = torch.empty(source.shape, dtype=source.dtype)
        source.read_into(out)
        expected = {"t": tensor, "empty": tensor[:0], "scalar": tensor[0, 1]}[source.name]
        assert out.shape == expected.shape
        assert torch.equal(out.reshape(-1).view(torch.uint8), expected.clone().reshape(-1).view(torch.uint8))


def test_a_copy_whose_end_no_event_shows_has_ended(tmp_path: Path) -> None:
    class Copies(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.Tensor.copy_:
                found.append((kwargs or {}).get("non_blocking", False))
            return func(*args, **(kwargs or {}))

    found: list[bool] = []
    save_file({"t": torch.randn(100)}, tmp_path / "a.safetensors")
    source = open_safetensors(tmp_path).tensors["t"]
    with Copies():
        Staging().fill(source, torch.empty(100, device="meta"))
    assert found == [device_type("meta").has_streams] == [False]


def test_staging_uses_its_two_buffers_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel_nb.bigmodel.safetensors_reader.CHUNK_BYTES", 64)
    values = torch.randn(100)
    save_file({"t": values}, tmp_path / "a.safetensors")
    source = open_safetensors(tmp_path).tensors["t"]
    staging, used = Staging(), []
    for begin, part in source.chunks(staging._next):
        assert torch.equal(part, values[begin : begin + 16])
        used.append(part.data_ptr())
    assert len(set(used)) == 2


def test_tensors_for_the_disk_stay_there(tmp_path: Path) -> None:
    model = empty(tied=False)
    places = {"embedding": "cpu", "positions": "cpu", "blocks": "disk", "norm": "cpu", "head": "disk"}
    loaded = load_checkpoint_in_model(model, save_sharded(Transformer(tied=False), tmp_path), places)
    assert model.blocks[0].up.weight.is_meta
    assert not model.norm.weight.is_meta
    assert "head.weight" in loaded.on_disk
    assert "blocks.0.table" not in loaded.on_disk, "buffers are offloaded only if asked for"


def test_progress_is_reported_in_bytes(tmp_path: Path) -> None:
    shown: list[tuple[int, int]] = []
    load_checkpoint_in_model(empty(), save_single(Transformer(), tmp_path), on_progress=lambda *now: shown.append(now))
    assert shown[-1][0] == shown[-1][1] > 0
    assert shown == sorted(shown)


def test_everything_that_does_not_match_is_reported_and_nothing_is_loaded(tmp_path: Path) -> None:
    tensors = {name: tensor.clone() for name, tensor in Transformer().state_dict().items()}
    del tensors["norm.bias"], tensors["blocks.3.up.weight"]
    tensors["positions"] = torch.zeros(1, 2)
    tensors["norm.weight"] = tensors["norm.weight"].to(torch.int32)
    tensors["other"] = torch.zeros(1)
    save_file(tensors, tmp_path / "model.safetensors")
    model = Transformer()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ConfigError) as caught:
        load_checkpoint_in_model(model, tmp_path, strict=True)
    text = str(caught.value)
    for part in ("positions has the shape (1, 2)", "int32", "norm.bias", "blocks.3.up.weight", "model lacks: other"):
        assert part in text
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())


def test_without_strict_lacks_and_leftovers_are_warned_of(tmp_path: Path) -> None:
    tensors = {name: tensor.clone() for name, tensor in Transformer().state_dict().items()}
    del tensors["norm.bias"]
    tensors["other"] = torch.zeros(1)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.warns(UserWarning, match=r"norm\.bias"), pytest.warns(UserWarning, match="not loaded: other"):
        loaded = load_checkpoint_in_model(Transformer(), tmp_path)
    assert (loaded.missing, loaded.unexpected) == (["norm.bias"], ["other"])
    with pytest.raises(ConfigError, match=r"lacks: norm\.bias"):
        load_checkpoint_in_model(empty(), tmp_path)


def test_tied_tensors_that_differ_in_the_checkpoint_are_refused(tmp_path: Path) -> None:
    save_file(Transformer(tied=False).state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"embedding\.weight and head\.weight are one tensor"):
        load_checkpoint_in_model(empty(), tmp_path)


def shard(folder: Path, header: object, data: bytes = b"", *, size: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = folder / "model.safetensors"
    path.write_bytes((len(text) if size is None else size).to_bytes(8, "little") + text + data)
    return path


F32 = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ([], b"", "not a JSON object"),
        (b"{", b"", "not strict JSON"),
        (b'{"a": 1, "a": 2}', b"", "duplicate key"),
        (b"[" * 100_000, b"", "not strict JSON|not a JSON"),
        (b"\xff\xff", b"", "not strict JSON"),
        (b'{"a": NaN}', b"", "not strict JSON"),
        ({"a": 7}, b"", "not described by dtype"),
        ({"a": {**F32, "dtype": "F4"}}, bytes(4), "dtype 'F4' is unknown"),
        ({"a": {**F32, "dtype": ["F32"]}}, bytes(4), "dtype"),
        ({"a": {**F32, "shape": [-1]}}, bytes(4), "not a list of sizes"),
        ({"a": {**F32, "shape": [True]}}, bytes(4), "not a list of sizes"),
        ({"a": {**F32, "shape": [2**40, 2**40]}}, bytes(4), "do not match its shape"),
        ({"a": {**F32, "shape": [2**99]}}, bytes(4), "not a list of sizes"),
        ({"a": {**F32, "shape": "1"}}, bytes(4), "not a list of sizes"),
        ({"a": {**F32, "data_offsets": [0, 4, 8]}}, bytes(4), "do not match"),
        ({"a": {**F32, "data_offsets": [4, 8]}}, bytes(8), "hole"),
        ({"a": F32, "b": F32}, bytes(4), "overlap"),
        ({"a": F32}, bytes(3), "truncated"),
        ({"a": F32}, bytes(5), "too long"),
    ],
)
def test_hostile_headers_are_refused(tmp_path: Path, header, data: bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_safetensors(shard(tmp_path, header, data))


@pytest.mark.parametrize("size", [2**63, 10**9, 100])
def test_headers_that_claim_more_than_the_file_are_refused(tmp_path: Path, size: int) -> None:
    with pytest.raises(ConfigError, match="header length"):
        open_safetensors(shard(tmp_path, {}, size=size))


def index(folder: Path, weight_map: object) -> Path:
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": weight_map}))
    return path


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/model.safetensors", "a/../../b.safetensors", "", "a\0.safetensors", "passwd"]
)
def test_an_index_may_only_name_files_beside_it(tmp_path: Path, name: str) -> None:
    save_single(Transformer(), tmp_path)
    with pytest.raises(ConfigError, match="names the file"):
        open_safetensors(index(tmp_path, {"a": name}))


def test_links_folders_and_pipes_are_refused(tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    save_file({"a": torch.ones(1)}, tmp_path / "out.safetensors")
    (inside / "link.safetensors").symlink_to(tmp_path / "out.safetensors")
    (inside / "folder.safetensors").mkdir()
    os.mkfifo(inside / "pipe.safetensors")
    names = {name: f"{name}.safetensors" for name in ("link", "folder", "pipe", "absent")}
    with pytest.raises(ConfigError) as caught:
        open_safetensors(index(inside, names))
    assert len(caught.value.problems) == 4
    assert "is a link" in str(caught.value)
    assert str(caught.value).count("not a regular file") == 2


def test_the_links_of_a_hub_cache_are_followed(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "snapshots/abc", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    expected = Transformer()
    shutil.move(save_single(expected, tmp_path), blobs / "0123")
    (snapshot / "model.safetensors").symlink_to("../../blobs/0123")
    model = empty()
    load_checkpoint_in_model(model, snapshot)
    assert_same(model, expected)


@pytest.mark.parametrize("weight_map", [None, [], {}, {"a": 1}, "x"])
def test_an_index_of_another_form_is_refused(tmp_path: Path, weight_map: object) -> None:
    with pytest.raises(ConfigError, match="weight_map"):
        open_safetensors(index(tmp_path, weight_map))


def test_an_index_that_errs_about_its_files_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "s.safetensors")
    with pytest.raises(ConfigError, match=r"lists 'b' in s\.safetensors, which does not contain it"):
        open_safetensors(index(tmp_path, {"b": "s.safetensors"}))


def test_pickled_checkpoints_are_refused_with_the_way_out(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "pytorch_model.bin")
    for path in (tmp_path, tmp_path / "pytorch_model.bin", tmp_path / "pytorch_model.bin.index.json"):
        with pytest.raises(ConfigError, match=r"could run any code.*save_file"):
            open_safetensors(path)


def test_folders_without_or_with_several_checkpoints_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no"):
        open_safetensors(tmp_path)
    with pytest.raises(ConfigError, match="there is no checkpoint"):
        open_safetensors(tmp_path / "x.safetensors")
    for name in ("a", "b"):
        save_file({"t": torch.ones(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ConfigError, match=r"several checkpoints: a\.safetensors, b\.safetensors"):
        open_safetensors(tmp_path)


def test_a_file_cut_short_after_opening_is_an_error(tmp_path: Path) -> None:
    path = save_single(Transformer(), tmp_path)
    opened = open_safetensors(path)
    os.truncate(path, 5000)
    source = max(opened.tensors.values(), key=lambda tensor: tensor.offset)
    with pytest.raises(OSError, match="truncated while in use"):
        source.read_into(torch.empty(source.shape))


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loading_takes_the_memory_of_the_weights_and_no_more(tmp_path: Path, dtype: str) -> None:
    with init_empty_weights():
        models = {"big": Transformer(width=768, depth=8, vocabulary=1024), "small": Transformer()}
    for name, model in models.items():
        (tmp_path / name).mkdir()
        save_zeros(model, tmp_path / name)
    load_checkpoint_in_model(models["small"], tmp_path / "small", dtype=dtype)
    grown = grown_bytes(lambda: load_checkpoint_in_model(models["big"], tmp_path / "big", dtype=dtype))
    weights = (tmp_path / "big/model.safetensors").stat().st_size // (1 if dtype == "float32" else 2)
    assert weights * 0.9 < grown <= weights * 1.05 + (8 << 20) * 4
