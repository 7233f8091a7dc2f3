"""Links, files that are opened by descriptors, and what libraries do with files: alike on every rank of a cell."""

from __future__ import annotations

import bz2
import os
import posix
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist

from accel_nb.runtime.world import World
from tests.conftest import wait_for
from tests.ranks.launch import run_ranks
from tests.ranks.plain_cells import plain_cells


def number_of_error(function: Callable[..., object], *args: Any) -> int | None:
    try:
        function(*args)
    except OSError as error:
        return error.errno
    return None


def names_of_opened_files() -> list[Any]:
    with open("a.txt", "w") as text:
        text.write("x")
    with open(text.name) as read:
        found = [text.name, read.name]
    os.remove(text.name)
    with open("b.bin", "wb") as binary:
        binary.write(b"x")
    os.rename(binary.name, "c.bin")
    return [*found, binary.name, sorted(os.listdir())]


def copies_and_archives() -> list[Any]:
    torch.save(torch.ones(3), "weights.pt")
    shutil.copy2("weights.pt", "copy.pt")
    with tarfile.open("weights.tar", "w") as archive:
        archive.add("weights.pt")
    with tarfile.open("weights.tar.gz", "w:gz") as archive:
        archive.add("copy.pt")
    with bz2.open("text.bz2", "wt") as text:
        text.write("x")
    numpy.savetxt("values.csv", numpy.arange(3.0))
    found: list[Any] = [torch.load("copy.pt").tolist(), Path("values.csv").read_text()]
    for name in ("weights.tar", "weights.tar.gz"):
        with tarfile.open(name) as archive:
            found.append(archive.getnames())
    with bz2.open("text.bz2", "rt") as text:
        found.append(text.read())
    os.remove("text.bz2")
    return [*found, numpy.loadtxt("values.csv").tolist(), sorted(os.listdir())]


def descriptors() -> list[Any]:
    lock = Path("lock")
    lock.touch(exist_ok=False)
    found: list[Any] = [number_of_error(lambda: lock.touch(exist_ok=False))]
    descriptor = os.open("text", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    os.write(descriptor, b"abc")
    os.close(descriptor)
    found += [number_of_error(os.open, "text", os.O_CREAT | os.O_EXCL), number_of_error(os.open, "absent", os.O_RDWR)]
    found.append(Path("text").read_text())
    os.truncate("text", 1)
    descriptor = os.open("text", os.O_RDONLY)
    found.append(os.read(descriptor, 9))
    os.close(descriptor)
    lock.unlink()
    return [*found, lock.exists(), number_of_error(os.truncate, "absent", 1)]


def symbolic_links() -> list[Any]:
    found: list[Any] = []
    for number in range(3):
        os.mkdir(f"step{number}")
        torch.save(torch.tensor(number), f"step{number}/weights.pt")
        os.symlink(f"step{number}", "next")
        os.replace("next", "latest")
        found += [torch.load("latest/weights.pt").item(), os.readlink("latest"), os.path.lexists("next")]
    Path("latest/more").write_text("x")
    found += [os.path.exists("step2/more"), sorted(os.listdir("latest")), Path("latest").is_symlink()]
    entries = os.scandir()
    found.append(sorted((entry.name, entry.is_symlink(), entry.is_dir(follow_symlinks=False)) for entry in entries))
    os.symlink("step0/weights.pt", "file")
    found += [os.path.getsize("file") == os.path.getsize("step0/weights.pt"), os.path.islink("file")]
    found += [number_of_error(os.symlink, "other", "file"), number_of_error(os.readlink, "step0")]
    os.unlink("file")
    os.symlink("second", "first")
    os.symlink("first", "second")
    os.symlink("nowhere", "dangling")
    found += [os.path.lexists("file"), os.path.exists("step0/weights.pt"), number_of_error(open, "first")]
    found += [os.path.exists("dangling"), os.path.lexists("dangling"), sorted(map(str, Path().rglob("weights.pt")))]
    return found


def hard_links() -> list[Any]:
    Path("text").write_text("x")
    os.link("text", "other")
    with open("other", "a") as file:
        file.write("!")
    found = [Path("text").read_text(), os.path.samefile("text", "other"), number_of_error(os.link, "text", "other")]
    os.remove("text")
    return [*found, Path("other").read_text(), number_of_error(os.link, "text", "third")]


OPERATIONS = {
    function.__name__: function
    for function in (names_of_opened_files, copies_and_archives, descriptors, symbolic_links, hard_links)
}


def in_cells(world: World, folder: Path, first: int) -> dict[str, Any]:
    """Run the operations, each in a cell and in a folder of its own, first on one rank and then on the other."""
    found: dict[str, Any] = {}
    for name, operate in OPERATIONS.items():
        own, ended = folder / name, folder / f"{name}.ended"
        os.chdir(own)
        with plain_cells(world):
            if world.rank != first:
                assert wait_for(ended.exists, 30)
            found[name] = operate()
            if world.rank == first:
                posix.close(posix.open(ended, os.O_CREAT))  # no function that a cell replaces
            dist.barrier()
        dist.barrier()
        found[f"{name} left"] = files_in(own)
    return found


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("first", [0, 1])
def test_operations_have_the_outcome_of_one_process(tmp_path: Path, first: int, monkeypatch) -> None:
    expected = {}
    for name, operate in OPERATIONS.items():
        (tmp_path / "both" / name).mkdir(parents=True)
        (tmp_path / "alone" / name).mkdir(parents=True)
        monkeypatch.chdir(tmp_path / "alone" / name)
        expected[name] = operate()
        expected[f"{name} left"] = files_in(tmp_path / "alone" / name)
    for found in run_ranks(in_cells, 2, tmp_path / "both", first):
        assert found == expected
