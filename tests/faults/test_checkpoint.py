"""Checkpoints under faults: kills at any moment, full disks, damaged and hostile files, two jobs in one folder."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import resource
import select
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_nb.checkpoint.background_save import CheckpointSaver
from accel_nb.checkpoint.layout import format_step_name
from accel_nb.checkpoint.load import materialize, open_checkpoint
from accel_nb.checkpoint.manifest import CheckpointOrigin, _digest
from accel_nb.checkpoint.store import LocalStore
from accel_nb.errors import CheckpointError, CorruptCheckpoint
from accel_nb.runtime.distributed.communicator import LocalComm, TorchComm
from accel_nb.runtime.distributed.process_group import DefaultGroup
from accel_nb.runtime.world import World
from tests.ranks.launch import run_ranks

NUM_KILLS = int(os.environ.get("KILLS", "20"))


def facts(step: int, run: str = "r") -> CheckpointOrigin:
    return CheckpointOrigin(run=run, step=step, world_size=1, strategy="single")


def tree_of(step: int) -> dict[str, Any]:
    return {"step": step, **{name: torch.full((200_000,), float(step)) for name in ("weights", "momentum")}}


def loaded_step(folder: Path) -> int:
    """Load the newest checkpoint, which must be whole and of one step, and return the step."""
    checkpoint = open_checkpoint(folder, LocalComm())
    assert checkpoint.skipped == []
    found = materialize(checkpoint.read_tree())
    assert {found["step"]} == set(found["weights"].tolist()) == set(found["momentum"].tolist())
    return found["step"]


def save_until_killed(world: World, folder: Path, first: int, is_blocking: bool, reported: int) -> None:
    saver, store = CheckpointSaver(LocalComm(), torch.device("cpu")), LocalStore(str(folder))
    for step in range(first, first + 100_000):
        saver.save(store, format_step_name(step), tree_of(step), facts(step), blocking=is_blocking, keep=3)
        os.write(reported, step.to_bytes(4, "little"))


def kill_again_and_again(world: World, folder: Path, seed: int, is_blocking: bool) -> int:
    """Run saves in a child, kill it at a random moment, look at what is left, and go on from there."""
    chance = random.Random(seed)
    newest = 0
    for _ in range(NUM_KILLS):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.close(reading)
                save_until_killed(world, folder, newest + 1, is_blocking, writing)
            finally:
                os._exit(1)
        os.close(writing)
        for _ in range(1 if is_blocking else 2):  # the first is complete, and the next one on its way
            reported = os.read(reading, 4)
        select.select([], [], [], chance.uniform(0, 0.05))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        while part := os.read(reading, 4):
            reported = part
        os.close(reading)
        newest = loaded_step(folder)
        assert newest >= int.from_bytes(reported, "little") - (0 if is_blocking else 1)
    return newest


@pytest.mark.parametrize("is_blocking", [False, True])
def test_a_kill_at_any_moment_leaves_the_newest_complete_checkpoint_readable(tmp_path: Path, is_blocking: bool) -> None:
    (newest,) = run_ranks(kill_again_and_again, 1, tmp_path, 5, is_blocking, timeout_s=60 + NUM_KILLS)
    assert newest >= NUM_KILLS
    saver = CheckpointSaver(LocalComm(), torch.device("cpu"))
    saver.save(LocalStore(str(tmp_path)), format_step_name(10**9), tree_of(1), facts(1), keep=1)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [format_step_name(10**9)], "leftovers stay"


def run_out_of_room(world: World, folder: Path, is_blocking: bool) -> list[str]:
    comm = LocalComm() if world.size == 1 else TorchComm(world, DefaultGroup.adopt(world))
    saver, store = CheckpointSaver(comm, torch.device("cpu")), LocalStore(str(folder))
    saver.save(store, "step_1", tree_of(1), facts(1))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    messages = []
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        saver.save(store, "step_2", tree_of(2), facts(2), blocking=is_blocking)
        saver.wait()
    except CheckpointError as error:
        messages.append(str(error))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    messages += sorted(os.listdir(folder)) if world.is_main else []
    saver.save(store, "step_3", tree_of(3), facts(3), blocking=is_blocking)
    saver.close()
    return messages


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("is_blocking", [False, True])
def test_a_file_that_may_not_grow_leaves_the_old_checkpoint_and_the_training(
    tmp_path: Path, is_blocking: bool, size: int
) -> None:
    messages = run_ranks(run_out_of_room, size, tmp_path, is_blocking)
    assert messages[0][1:] == ["latest", "step_1"]
    assert all("File too large" in found[0] and "step_2 was not saved" in found[0] for found in messages)
    assert loaded_step(tmp_path) == 3


def _save_and_wait(saver: CheckpointSaver, store: LocalStore, step: int, is_blocking: bool) -> None:
    saver.save(store, format_step_name(step), tree_of(step), facts(step), blocking=is_blocking)
    saver.wait()


@pytest.fixture
def small_disk(tmp_path: Path) -> Any:
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("mounting a small file system needs rights that are not there")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.parametrize("is_blocking", [False, True])
def test_a_full_disk_leaves_the_old_checkpoint_and_the_training(small_disk: Path, is_blocking: bool) -> None:
    saver, store = CheckpointSaver(LocalComm(), torch.device("cpu")), LocalStore(str(small_disk))
    saver.save(store, "step_1", tree_of(1), facts(1), blocking=is_blocking)
    saver.wait()
    saver.save(store, "step_2", tree_of(2), facts(2), blocking=is_blocking)
    saver.wait()
    with pytest.raises(CheckpointError, match="No space left on device"):
        _save_and_wait(saver, store, 3, is_blocking)
    assert loaded_step(small_disk) == 2
    store.remove("step_1")
    saver.save(store, "step_3", tree_of(3), facts(3), blocking=is_blocking)
    saver.close()
    assert loaded_step(small_disk) == 3


@pytest.mark.parametrize("is_blocking", [False, True])
def test_a_disk_that_fails_leaves_the_old_checkpoint_and_the_training(
    tmp_path: Path, is_blocking: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver, store = CheckpointSaver(LocalComm(), torch.device("cpu")), LocalStore(str(tmp_path))
    saver.save(store, "step_1", tree_of(1), facts(1))
    for name, number in (("fsync", errno.EIO), ("fsync", errno.EDQUOT), ("rename", errno.EROFS)):
        with monkeypatch.context() as broken:

            def fail(*args: Any, number: int = number) -> None:
                raise OSError(number, os.strerror(number))

            broken.setattr(os, name, fail)
            with pytest.raises(CheckpointError, match=re.escape(os.strerror(number))):
                _save_and_wait(saver, store, 2, is_blocking)
        assert loaded_step(tmp_path) == 1
    _save_and_wait(saver, store, 3, is_blocking)
    saver.close()
    assert loaded_step(tmp_path) == 3
    saver.save(store, "step_4", tree_of(4), facts(4))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_1", "step_3", "step_4"]


def test_clocks_that_jump_back_change_nothing(tmp_path: Path) -> None:
    saver, store = CheckpointSaver(LocalComm(), torch.device("cpu")), LocalStore(str(tmp_path))
    for step in (9, 10, 11):  # the newest by step is the oldest by every clock
        created = f"20{30 - step}-01-01T00:00:00+00:00"
        saver.save(store, format_step_name(step), tree_of(step), replace(facts(step), created=created), keep=2)
        os.utime(tmp_path / format_step_name(step), (10_000 - step, 10_000 - step))
    (tmp_path / "latest").write_text("step_10\n")
    assert loaded_step(tmp_path) == 11
    assert sorted(path.name for path in tmp_path.glob("step_*")) == ["step_10", "step_11"]


# --- loss of power ---


class Disk:
    """Notes what a store does to a folder, and says what a loss of power leaves of it after any number of these acts.

    Content counts once its file is synced. Names come in two ways: all that were given, or only those whose folder has
    been synced since; disks do both.
    """

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.acts: list[tuple[str, str, str | bytes]] = []
        rename, sync = os.rename, os.fsync

        def renamed(source: Any, target: Any) -> None:
            rename(source, target)
            self.acts.append(("rename", self._name(source), self._name(target)))

        def synced(descriptor: int) -> None:
            sync(descriptor)
            path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            content = b"" if path.is_dir() else path.read_bytes()
            self.acts.append(("folder" if path.is_dir() else "file", self._name(path), content))

        monkeypatch.setattr(os, "rename", renamed)
        monkeypatch.setattr(os, "replace", renamed)
        monkeypatch.setattr(os, "fsync", synced)

    def _name(self, path: Any) -> str:
        return os.path.relpath(path, self.root)

    def after(self, num_acts: int, *, keeps_names: bool) -> dict[str, bytes]:
        """Return the files by name: what was synced, under the names that have survived."""
        now: dict[str, bytes] = {}
        durable: dict[str, bytes] = {}
        for act, name, rest in self.acts[:num_acts]:
            if act == "file":
                assert isinstance(rest, bytes)
                now[name] = rest
                durable.update({known: rest for known in durable if known == name})
            elif act == "rename":
                assert isinstance(rest, str)
                inside = {known: content for known, content in now.items() if (known + "/").startswith(name + "/")}
                now = {known: content for known, content in now.items() if known not in inside}
                now.update({rest + known[len(name) :]: content for known, content in inside.items()})
            else:
                durable = dict(now) if name == "." else durable
        return now if keeps_names else durable


def test_a_loss_of_power_at_any_moment_leaves_the_newest_complete_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver, store = CheckpointSaver(LocalComm(), torch.device("cpu")), LocalStore(str(tmp_path / "disk"))
    with monkeypatch.context() as watched:
        disk = Disk(tmp_path / "disk", watched)
        done: list[tuple[int, int]] = []
        for step in (1, 2, 2, 3):  # a checkpoint may replace one of the same name
            saver.save(store, format_step_name(step), tree_of(step), facts(step))
            done.append((len(disk.acts), step))
    for keeps_names in (True, False):
        for num_acts in range(done[0][0], len(disk.acts) + 1):
            left = tmp_path / f"{num_acts}-{keeps_names}"
            for name, content in disk.after(num_acts, keeps_names=keeps_names).items():
                (left / name).parent.mkdir(parents=True, exist_ok=True)
                (left / name).write_bytes(content)
            saved = max(step for acts, step in done if acts <= num_acts)
            assert loaded_step(left) >= saved, f"after {disk.acts[num_acts - 1][:2]}"
            shutil.rmtree(left)


# --- damage ---


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) * 2 // 3] ^= 1
    path.write_bytes(content)


def link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE: list[Callable[[Path], Any]] = [
    flip, link, fifo, folder,
    lambda path: os.truncate(path, path.stat().st_size - 1), lambda path: os.truncate(path, 0),
    lambda path: path.write_bytes(path.read_bytes() + b"\0"), lambda path: path.write_bytes(b"\x80\x04K\x01."),
    Path.unlink,
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("pattern", ["manifest.json", "state.json", "tensors-*"])
def test_damage_is_refused_by_file_name_and_the_older_one_is_read(
    tmp_path: Path, pattern: str, damage: Callable[[Path], Any]
) -> None:
    saver, store = CheckpointSaver(LocalComm(), torch.device("cpu")), LocalStore(str(tmp_path))
    for step in (1, 2):
        saver.save(store, format_step_name(step), tree_of(step), facts(step))
    (path,) = (tmp_path / "step_2").glob(pattern)
    damage(path)
    checkpoint = open_checkpoint(tmp_path, LocalComm())
    assert checkpoint.manifest.origin.step == 1
    if path.is_file() or pattern != "manifest.json":  # without a manifest it is not a checkpoint at all
        assert path.name in checkpoint.skipped[0]
        with pytest.raises(CorruptCheckpoint, match=path.name.replace(".", r"\.")):
            open_checkpoint(tmp_path / "step_2", LocalComm())


def edit(content: dict[str, Any], *keys: Any, value: Any) -> None:
    for key in keys[:-1]:
        content = content[key]
    content[keys[-1]] = value


TENSORS = "tensors-00000-of-00001-000.safetensors"
HOSTILE: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda m: edit(m, "files", "../../etc/passwd", value={"size": 1, "xxh3": ["0"]}), "is not allowed"),
    (lambda m: edit(m, "files", "/etc/passwd", value={"size": 1, "xxh3": ["0"]}), "is not allowed"),
    (lambda m: edit(m, "files", "a\0b", value={"size": 1, "xxh3": ["0"]}), "is not allowed"),
    (lambda m: edit(m, "tensors", "weights", "pieces", 0, 0, value="../x"), "is not allowed"),
    (lambda m: edit(m, "tensors", "weights", "pieces", 0, 0, value="other"), "is not listed"),
    (lambda m: edit(m, "tensors", "weights", "pieces", 0, 1, value="nothing"), "has no F32"),
    (lambda m: edit(m, "tensors", "weights", "pieces", value=[]), "do not cover"),
    (lambda m: edit(m, "tensors", "weights", "shape", value=[1 << 61, 4]), "do not cover"),
    (lambda m: edit(m, "tensors", "weights", "shape", value=[-1]), "not a list of sizes"),
    (lambda m: edit(m, "tensors", "weights", "dtype", value="object"), "dtype"),
    (lambda m: edit(m, "tensors", "weights", "dtype", value="I32"), "has no I32"),
    (lambda m: edit(m, "files", TENSORS, "size", value=1 << 60), "do not match its size"),
    (lambda m: edit(m, "files", TENSORS, "size", value=1.5), "not a list of sizes"),
    (lambda m: edit(m, "files", TENSORS, "xxh3", 0, value="zz"), "not a hexadecimal number"),
    (lambda m: edit(m, "files", TENSORS, "xxh3", 0, value="00000000"), "are damaged"),
    (lambda m: edit(m, "version", value=3), "newer accel_nb"),
    (lambda m: edit(m, "version", value="1"), "its version is '1'"),
    (lambda m: edit(m, "format", value="other"), "not a manifest"),
    (lambda m: edit(m, "chunk_bytes", value=1), "chunk_bytes"),
    (lambda m: edit(m, "state", value="/etc/passwd"), "does not list"),
    (lambda m: edit(m, "step", value=True), "not a list of sizes"),
    (lambda m: edit(m, "run", value="\x1b[31m"), "not a short text"),
    (lambda m: edit(m, "files", value=[]), "files is not an object"),
    (lambda m: m["tensors"].pop("weights"), "state.json"),
]


@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_a_hostile_manifest_is_refused(tmp_path: Path, number: int) -> None:
    change, why = HOSTILE[number]
    CheckpointSaver(LocalComm(), torch.device("cpu")).save(LocalStore(str(tmp_path)), "step_1", tree_of(1), facts(1))
    path = tmp_path / "step_1" / "manifest.json"
    content = json.loads(path.read_bytes())
    content.pop("digest")
    change(content)
    path.write_text(json.dumps({**content, "digest": _digest(content)}))
    with pytest.raises(CorruptCheckpoint, match=why):
        open_checkpoint(tmp_path, LocalComm()).read_tree()


def header(text: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def tensor(shape: Any = (2,), ends: Any = (0, 8), dtype: Any = "F32") -> bytes:
    return json.dumps({"weights": {"dtype": dtype, "shape": shape, "data_offsets": ends}}).encode()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "too few"),
        (header(b"{}", length=1 << 63), "its header length"),
        (header(b"{}", length=200), "its header length"),
        (header(b"[]"), "not a JSON object"),
        (header(b'{"a": 1}'), "not described"),
        (header(b"{", b""), "not strict JSON"),
        (header(tensor(), b"1234567"), "the tensors end at"),
        (header(tensor(), b"123456789"), "the tensors end at"),
        (header(tensor(ends=(8, 16)), b"1" * 16), "leaves a hole"),
        (header(tensor(ends=(8, 0)), b""), "do not match"),
        (header(tensor(shape=[1 << 61, 1 << 61]), b"1" * 8), "do not match"),
        (header(tensor(shape=[-2]), b"1" * 8), "not a list of sizes"),
        (header(tensor(dtype="P"), b"1" * 8), "is unknown"),
    ],
)
def test_a_hostile_tensor_file_is_refused_though_its_checksum_fits(tmp_path: Path, content: bytes, why: str) -> None:
    from accel_nb.checkpoint.manifest import make_file_record

    CheckpointSaver(LocalComm(), torch.device("cpu")).save(
        LocalStore(str(tmp_path)), "step_1", {"weights": torch.ones(2)}, facts(1)
    )
    (path,) = (tmp_path / "step_1").glob("tensors-*")
    path.write_bytes(content)
    record = make_file_record(content)
    target = tmp_path / "step_1" / "manifest.json"
    manifest = json.loads(target.read_bytes())
    manifest.pop("digest")
    manifest["files"][path.name] = {"size": record.size, "xxh3": [f"{value:016x}" for value in record.checksums]}
    target.write_text(json.dumps({**manifest, "digest": _digest(manifest)}))
    with pytest.raises(CorruptCheckpoint, match=why) as caught:
        open_checkpoint(tmp_path, LocalComm()).read_tree()
    assert path.name in str(caught.value)


def test_a_checkpoint_folder_that_is_a_link_is_not_looked_at(tmp_path: Path) -> None:
    saver = CheckpointSaver(LocalComm(), torch.device("cpu"))
    saver.save(LocalStore(str(tmp_path / "a")), "step_9", tree_of(9), facts(9))
    saver.save(LocalStore(str(tmp_path / "b")), "step_1", tree_of(1), facts(1))
    (tmp_path / "b" / "step_5").symlink_to(tmp_path / "a" / "step_9")
    assert loaded_step(tmp_path / "b") == 1


def test_two_jobs_in_one_folder_do_not_mix(tmp_path: Path) -> None:
    outcomes: dict[str, list[int]] = {"a": [], "b": []}
    start = threading.Barrier(2)

    def job(run: str, value: int) -> None:
        saver, store = CheckpointSaver(LocalComm(), torch.device("cpu")), LocalStore(str(tmp_path))
        start.wait()
        for step in range(1, 9):
            tree = {"run": run, "step": step, "weights": torch.full((5000,), float(value))}
            try:
                saver.save(store, format_step_name(step), tree, facts(step, run), blocking=False, keep=3)
                saver.wait()
                outcomes[run].append(step)
            except CheckpointError:
                continue

    threads = [threading.Thread(target=job, args=("a", 1)), threading.Thread(target=job, args=("b", 2))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes["a"] or outcomes["b"]
    folders = [path for path in tmp_path.iterdir() if path.is_dir()]
    assert folders
    for path in folders:
        checkpoint = open_checkpoint(path, LocalComm())
        found = materialize(checkpoint.read_tree())
        assert checkpoint.manifest.origin.run == found["run"]
        assert set(found["weights"].tolist()) == {1.0 if found["run"] == "a" else 2.0}
    shutil.rmtree(tmp_path)
