"""The parts of a checkpoint in one process: encoding, planning, stores, finding, verifying."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from accel_nb.checkpoint import load as load_module
from accel_nb.checkpoint import manifest as manifest_module
from accel_nb.checkpoint import save as save_module
from accel_nb.checkpoint.background_save import CheckpointSaver
from accel_nb.checkpoint.discovery import find_checkpoints, list_checkpoints, remove_oldest
from accel_nb.checkpoint.encoding import decode, encode
from accel_nb.checkpoint.export import WeightWriter, drop_tied_duplicates
from accel_nb.checkpoint.layout import Region, covers_exactly, format_step_name, full_region
from accel_nb.checkpoint.load import StoredTensor, materialize, open_checkpoint
from accel_nb.checkpoint.manifest import CheckpointOrigin
from accel_nb.checkpoint.remote import RemoteStore
from accel_nb.checkpoint.store import LocalStore, Store
from accel_nb.checkpoint.store_url import open_store, split_url
from accel_nb.checkpoint.write_plan import TensorPlan, plan_writes
from accel_nb.errors import CheckpointError, CorruptCheckpoint, NoCheckpoint
from accel_nb.runtime.distributed.communicator import LocalComm

FACTS = CheckpointOrigin(run="r1", step=1, world_size=1, strategy="single")


def save(store: Store, name: str, tree: Any, run: str = "r1", **options: Any) -> None:
    saver = CheckpointSaver(LocalComm(), torch.device("cpu"))
    saver.save(store, name, tree, CheckpointOrigin(run=run, step=1, world_size=1, strategy="single"), **options)
    saver.close()


def load(url: Any) -> Any:
    return materialize(open_checkpoint(url, LocalComm()).read_tree())


def through(tree: Any) -> Any:
    encoded = encode(tree)
    assert not encoded.leaves
    json.loads(encoded.to_bytes(), parse_constant=lambda name: pytest.fail(name))
    return decode(encoded.to_bytes(), lambda path: pytest.fail(path), "here")


def same(left: Any, right: Any) -> bool:
    """Equality that compares types, the order of keys and NaN."""
    if type(left) is not type(right):
        return False
    if isinstance(left, float | np.floating):
        return left == right or (math.isnan(left) and math.isnan(right))
    if isinstance(left, dict):
        return len(left) == len(right) and all(
            same(a, b) and same(left[a], right[b]) for a, b in zip(left, right, strict=True)
        )
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(max_size=9)
TREES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=4) | st.integers() | st.tuples(st.integers(), st.text(max_size=2)), inner)
    ),
    max_leaves=12,
)


@settings(deadline=None, max_examples=150)
@given(TREES)
def test_any_plain_tree_comes_back_with_its_types(tree: Any) -> None:
    assert same(through(tree), tree)


@pytest.mark.parametrize(
    "value",
    [
        OrderedDict(b=1, a=2), Counter({3: 2}), {1: "a", "1": "b", None: 3}, {"$dict": 1}, {"$": {}}, {2, 3},
        frozenset({"x"}), np.float32(0.1), np.int64(-7), np.uint8(3), np.bool_(True), np.float64("nan"), float("-inf"),
        complex(1, math.inf), torch.bfloat16, torch.Size([2, 3]), 2**1000, -0.0, b"\0\xff", (), {}, [],
    ],
)  # fmt: skip
def test_what_state_dicts_hold_comes_back(value: Any) -> None:
    assert same(through(value), value)


class Odd(dict[str, int]):
    pass


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (object(), "builtins.object"), (Odd(), "Odd"), (print, "builtin_function"), (torch.nn.Linear(1, 1), "Linear"),
        (torch.eye(2).to_sparse(), "sparse"), (np.array(["a"]), "array"), (2**5000, "4096 bits"),
        (lambda: 0, "function"), (torch.zeros(2, dtype=torch.complex128), "complex128"), (np.zeros(2, ">i4"), ">i4"),
    ],
)  # fmt: skip
def test_what_cannot_be_stored_is_named_by_its_path(value: Any, why: str) -> None:
    with pytest.raises(CheckpointError, match=rf"optimizers/0/a~1b cannot be stored: .*{why}"):
        encode({"optimizers": [{"a/b": value}]})


def test_a_tree_that_contains_itself_is_refused() -> None:
    tree: list[Any] = []
    tree.append(tree)
    with pytest.raises(CheckpointError, match="contains itself"):
        encode(tree)


@pytest.mark.parametrize(
    "text",
    [
        '{"$dtype": "Tensor"}', '{"$dtype": "load"}', '{"$float": "1"}', '{"$set": [[]]}', '{"$numpy": ["object", 1]}',
        '{"$eval": "1"}', '{"$tensor": 3}', '{"$tensor": "x", "a": 1}', '{"a": NaN}', '{"a": 1, "a": 2}', "[" * 5000,
        '{"$bytes": "!"}', '{"$dict": [1]}', '{"$size": ["a"]}', '{"$numpy": ["int8", 1e9]}', "", "\xff",
        '{"$complex": ["1", 2]}', '{"$counter": 1}', "[" * 300 + "]" * 300,
    ],
)  # fmt: skip
def test_hostile_state_is_refused(text: str) -> None:
    with pytest.raises(CorruptCheckpoint, match=r"state\.json"):
        decode(text.encode("latin-1"), {}.__getitem__, "state.json")


ALL_DTYPES = [*save_module.DTYPE_NAMES]


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return open_store(tmp_path / "runs") if request.param == "local" else open_store(f"memory://{tmp_path.name}")


@pytest.mark.parametrize("blocking", [True, False])
def test_tensors_of_every_dtype_come_back(store: Store, blocking: bool) -> None:
    torch.manual_seed(0)
    tensors = {
        str(dtype): torch.randint(0, 2, (3, 5)).to(torch.uint8).to(dtype)
        if dtype.itemsize > 1 or dtype in (torch.bool, torch.uint8, torch.int8)
        else torch.randn(3, 5).to(dtype)
        for dtype in ALL_DTYPES
    }
    base, pair = torch.randn(6, 4), torch.randn(2, dtype=torch.complex64)
    tree = {
        "dtypes": tensors, "empty": torch.zeros(0, 3), "scalar": torch.tensor(2.5), "strided": base.t(),
        "tied": [base, base], "view": base[1:3], "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "conj": torch.ones(2, dtype=torch.complex64).conj(), 3: {"deep": (torch.ones(1), None)}, "3": torch.zeros(1),
        "imaginary": pair.imag, "negative": pair.conj().imag, "keys": {None: torch.zeros(1), "None": torch.ones(1)},
    }  # fmt: skip
    save(store, "step_1", tree, blocking=blocking)
    found = load(store.url)
    for name, tensor in tensors.items():
        assert found["dtypes"][name].dtype == tensor.dtype
        assert torch.equal(found["dtypes"][name].view(torch.uint8), tensor.view(torch.uint8))
    for name in ("empty", "scalar", "strided", "view", "conj", "3", "imaginary", "negative"):
        assert torch.equal(found[name], tree[name])  # type: ignore[arg-type]
    assert [value.item() for value in found["keys"].values()] == [0, 1]
    assert found["tied"][0] is found["tied"][1]
    assert found["array"].dtype == np.int16
    assert found["array"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert torch.equal(found[3]["deep"][0], torch.ones(1))


def test_other_libraries_read_the_tensor_files(tmp_path: Path) -> None:
    save(LocalStore(str(tmp_path)), "step_1", {"w": torch.arange(6.0).reshape(2, 3), "n": torch.tensor([True])})
    (path,) = (tmp_path / "step_1").glob("*.safetensors")
    with safe_open(path, "pt") as file:
        assert torch.equal(file.get_tensor("w"), torch.arange(6.0).reshape(2, 3))


def test_a_background_save_holds_the_values_of_its_moment(store: Store) -> None:
    saver = CheckpointSaver(LocalComm(), torch.device("cpu"))
    weight = torch.zeros(1000)
    for step in range(1, 4):
        saver.save(store, format_step_name(step), {"w": weight}, FACTS, blocking=False)
        weight += 1
    saver.close()
    for step in range(1, 4):
        assert load(f"{store.url}/step_{step}")["w"].unique().tolist() == [step - 1]


def test_large_tensors_are_split_and_chunks_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (manifest_module, save_module):
        monkeypatch.setattr(module, "CHUNK_BYTES", 1000)
    monkeypatch.setattr("accel_nb.checkpoint.write_plan.MAX_FILE_BYTES", 5000)
    monkeypatch.setattr("accel_nb.checkpoint.write_plan.MIN_SPLIT_BYTES", 3000)
    tree = {f"w{n}": torch.randn(n, 30) for n in range(1, 40)}
    save(LocalStore(str(tmp_path)), "step_1", tree)
    found = load(tmp_path)
    assert all(torch.equal(found[name], value) for name, value in tree.items())
    assert len(list((tmp_path / "step_1").glob("*.safetensors"))) > 5


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=8), st.integers(1, 5))
def test_a_plan_covers_every_tensor_once(shapes: list[tuple[int, int]], world_size: int) -> None:
    tensors = [TensorPlan(f"t{n}", "F32", shape, "replicated") for n, shape in enumerate(shapes)]
    plan = plan_writes(tensors, [{}] * world_size)
    records = plan.records()
    assert set(records) == {tensor.path for tensor in tensors}
    for record in records.values():
        assert covers_exactly([piece.region for piece in record.pieces], record.shape)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 4), st.integers(1, 4)), max_size=4))
def test_tiling_is_what_counting_says(boxes: list[tuple[int, int, int, int]]) -> None:
    count = np.zeros((9, 9), dtype=int)
    for top, left, height, width in boxes:
        count[top : top + height, left : left + width] += 1
    regions = [Region((top, left), (height, width)) for top, left, height, width in boxes]
    expected = bool((count[:4, :4] == 1).all() and count.sum() == 16)
    assert covers_exactly(regions, (4, 4)) == expected
    assert covers_exactly([full_region((4, 4))], (4, 4))


def test_a_checkpoint_of_another_run_is_left_alone(store: Store) -> None:
    save(store, "step_1", {"w": torch.zeros(2)}, run="first")
    with pytest.raises(CheckpointError, match="written by another run"):
        save(store, "step_1", {"w": torch.ones(2)}, run="second")
    assert load(store.url)["w"].tolist() == [0, 0]


def test_a_checkpoint_of_the_same_run_is_replaced(store: Store) -> None:
    save(store, "last", {"w": torch.zeros(2)})
    save(store, "last", {"w": torch.ones(5), "v": torch.ones(1)})
    assert load(f"{store.url}/last")["w"].tolist() == [1] * 5
    assert len(store.files("last")) == 3  # manifest, state, tensors
    assert store.folders() == ["last"]


def test_a_folder_that_is_no_checkpoint_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(CheckpointError, match="exists and is not a checkpoint"):
        save(LocalStore(str(tmp_path)), "mine", {"w": torch.zeros(2)})
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_file_or_a_link_of_the_name_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_text("x")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name, what in (("model.pt", "file"), ("link", "link")):
        with pytest.raises(CheckpointError, match=f"{name} is a {what}, and no folder; it is not changed"):
            save(LocalStore(str(tmp_path)), name, {"w": torch.zeros(2)})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "link", "model.pt"]
    assert (tmp_path / "link").is_symlink()


def test_a_file_system_without_locks_holds_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    for step in (1, 2):
        save(LocalStore(str(tmp_path)), format_step_name(step), {"w": torch.full((1,), float(step))})
    assert load(tmp_path)["w"].item() == 2


def test_remains_that_cannot_be_removed_do_not_prevent_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remains = tmp_path / ("step_1.gone-" + "a" * 12)
    remains.mkdir()
    original = os.rename

    def rename(source: Any, target: Any) -> None:
        if str(source) == str(remains):
            raise PermissionError(13, "Permission denied", str(source))
        original(source, target)

    monkeypatch.setattr(os, "rename", rename)
    save(LocalStore(str(tmp_path)), "step_2", {"w": torch.zeros(1)})
    assert load(tmp_path)["w"].item() == 0
    assert remains.is_dir()


def test_an_interrupt_before_the_first_byte_leaves_nothing(tmp_path: Path) -> None:
    class Interrupted(LocalComm):
        def all_gather_json(self, value: Any) -> list[Any]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_module.plan_save(LocalStore(str(tmp_path)), "step_1", {"w": torch.zeros(1)}, FACTS, Interrupted())
    assert not list(tmp_path.iterdir())


def test_any_error_of_a_rank_that_writes_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise TypeError("no bytes")

    monkeypatch.setattr(save_module, "as_bytes", fail)
    with pytest.raises(CheckpointError, match="rank 0: TypeError: no bytes"):
        save(LocalStore(str(tmp_path)), "step_1", {"w": torch.zeros(1)})
    assert not list(tmp_path.iterdir())


class Wrapper(torch.Tensor):
    """A tensor whose values would be in other tensors, as those of a quantized one."""

    @staticmethod
    def __new__(cls) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, (2,))

    @classmethod
    def __torch_dispatch__(cls, *_: Any, **options: Any) -> Any:
        return cls()


def test_a_tensor_without_memory_of_its_own_is_refused(tmp_path: Path) -> None:
    wrapper, weights = Wrapper(), WeightWriter(tmp_path, 1000)
    with pytest.raises(CheckpointError, match=r"a/w cannot be stored: this .*Wrapper on cpu has no memory"):
        save(LocalStore(str(tmp_path)), "step_1", {"a": {"w": wrapper}})
    weights.add("w", wrapper)
    with pytest.raises(CheckpointError, match="w: a Wrapper has no memory of its own"):
        weights.finish()
    assert list(drop_tied_duplicates({"a": wrapper, "b": wrapper.detach()})) == ["a", "b"]


def test_only_own_old_checkpoints_are_pruned(store: Store) -> None:
    save(store, "step_1", {"w": torch.zeros(1)}, run="other")
    save(store, "best", {"w": torch.zeros(1)})
    for step in (9, 10, 11):
        save(store, format_step_name(step), {"w": torch.zeros(1)}, keep=2)
    assert list_checkpoints(store) == ["step_11", "step_10", "step_1"]
    assert sorted(store.folders()) == ["best", "step_1", "step_10", "step_11"]
    save(store, "step_2", {"w": torch.zeros(1)}, keep=2)  # rolled back: the newest saved stays, whatever its step
    assert list_checkpoints(store) == ["step_11", "step_10", "step_2", "step_1"]
    assert remove_oldest(store, "nobody", 1, newest="x") == []


def test_leftovers_of_dead_saves_are_swept_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    store, other = LocalStore(str(tmp_path)), LocalStore(str(tmp_path))
    living = other.begin("step_5", "b" * 12)
    dead = store.begin("step_6", "c" * 12)
    store.write(dead, "part", [b"x"])
    os.close(store._locks.pop(dead))  # what the end of a process does
    save(store, "step_7", {"w": torch.zeros(1)})
    assert sorted(store.folders()) == [living, "step_7"]
    other.discard(living, ())


def test_a_kill_between_the_two_renames_loses_nothing(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    save(store, "last", {"w": torch.zeros(2)})
    (tmp_path / "last").rename(tmp_path / ("last.old-" + "d" * 12))
    assert load(tmp_path / "last")["w"].tolist() == [0, 0]
    (tmp_path / ("empty.old-" + "d" * 12)).mkdir()
    with pytest.raises(NoCheckpoint, match="no complete checkpoint"):
        find_checkpoints(tmp_path / "empty")


@pytest.mark.parametrize("name", ["", "..", "a/b", "step_1.tmp-0123456789ab"])
def test_names_that_no_checkpoint_may_have(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match="cannot be the name"):
        save(LocalStore(str(tmp_path)), name, {})


def test_urls_are_split_into_root_and_name(tmp_path: Path) -> None:
    assert split_url("s3://bucket/runs/step_3/") == ("s3://bucket/runs", "step_3")
    assert split_url("s3://bucket/run") == ("s3://bucket", "run")
    assert split_url("s3://bucket") == ("s3://bucket", "")
    assert split_url(tmp_path / "a") == (str(tmp_path), "a")
    assert split_url(f"file://{tmp_path}/a") == (str(tmp_path), "a")
    assert isinstance(open_store("memory://x"), RemoteStore)
    with pytest.raises(CheckpointError, match="no store can be opened"):
        open_store("nonsense://x")
    with pytest.raises(NoCheckpoint, match="no complete checkpoint"):
        find_checkpoints(tmp_path / "nothing")


def test_a_part_is_read_without_the_rest(tmp_path: Path) -> None:
    save(LocalStore(str(tmp_path)), "step_1", {"w": torch.arange(20.0).reshape(4, 5)})
    stored = open_checkpoint(tmp_path, LocalComm()).read_tree()["w"]
    assert isinstance(stored, StoredTensor)
    assert stored.read(Region((1, 2), (2, 3))).tolist() == [[7, 8, 9], [12, 13, 14]]
    assert stored.read().shape == (4, 5)


def test_a_storage_error_of_one_rank_is_a_reason_to_skip_a_checkpoint(store: Store, monkeypatch) -> None:
    for name in ("step_1", "step_2"):
        save(store, name, {"a": name})
    original = load_module.map_files

    def map_files(of: Store, name: str, manifest: Any) -> Any:
        if name in broken:
            raise PermissionError(13, "Permission denied", name)
        return original(of, name, manifest)

    monkeypatch.setattr(load_module, "map_files", map_files)
    broken = ["step_2"]
    opened = open_checkpoint(store.url, LocalComm())
    assert opened.read_tree() == {"a": "step_1"}
    assert [line for line in opened.skipped if "step_2: [Errno 13] Permission denied" in line]
    broken = ["step_1", "step_2"]
    with pytest.raises(CorruptCheckpoint, match="Permission denied"):
        open_checkpoint(store.url, LocalComm())
