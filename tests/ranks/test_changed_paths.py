"""What the first rank has changed is as before for a rank that has not got there, until the ranks have met."""

from __future__ import annotations

import errno
import os
import shutil
import time
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


def opens(path: Path) -> bool:
    try:
        path.open().close()
    except FileNotFoundError:
        return False
    return True


def makes_what_is_absent(world: World, folder: Path) -> dict[str, Any]:
    """Run the code of one cell, in which rank 1 begins when rank 0 has ended it."""
    cache, note, ended = folder / "cache", folder / "note.txt", folder / "ended"
    found: dict[str, Any] = {"made": []}
    with plain_cells(world):
        if world.rank == 1:
            assert wait_for(ended.exists, 30)
        found["opened"] = opens(cache / "0.npy"), opens(note)
        if not cache.exists():
            os.makedirs(cache)
        for number in range(3):
            path = cache / f"{number}.npy"
            if not path.exists():
                numpy.save(path, numpy.full(4, float(world.rank)))
                found["made"].append(number)
        found["listed"] = sorted(os.listdir(cache))
        found["read"] = float(numpy.load(cache / "2.npy")[0])
        if world.rank == 0:
            note.write_text("of rank 0 only")
            os.close(os.open(ended, os.O_CREAT))  # which is no function that a cell's files are written by
        found["before"] = note.exists(), sorted(path.name for path in folder.iterdir())
        dist.barrier()
        found["after"] = note.exists(), note.read_text()
    found["left"] = [float(numpy.load(path)[0]) for path in sorted(cache.iterdir())]
    return found


def test_a_rank_that_comes_late_makes_what_the_first_one_has_made(tmp_path: Path) -> None:
    first, late = run_ranks(makes_what_is_absent, 2, tmp_path)
    names = ["0.npy", "1.npy", "2.npy"]
    assert first["before"] == (True, ["cache", "ended", "note.txt"])
    assert late["before"] == (False, ["cache", "ended"])
    for rank, found in enumerate((first, late)):
        assert found["opened"] == (False, False)
        assert (found["made"], found["listed"], found["read"]) == ([0, 1, 2], names, float(rank))
        assert found["after"] == (True, "of rank 0 only")
    assert first["left"] == [0.0, 0.0, 0.0], "the files are those of the first rank"


def saves_through_a_link(world: World, folder: Path) -> float | None:
    """Save what is absent, by a path through a link, in code that rank 1 runs when rank 0 has ended it."""
    path, ended = folder / "link" / "weights.pt", folder / "ended"
    with plain_cells(world):
        if world.rank == 1:
            assert wait_for(ended.exists, 30)
        is_absent = not path.exists()
        if is_absent:
            torch.save(torch.tensor(float(world.rank)), path)
        if world.rank == 0:
            ended.touch()
        dist.barrier()
    return torch.load(path).item() if is_absent else None


def test_a_rank_that_comes_late_finds_nothing_new_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    assert run_ranks(saves_through_a_link, 2, tmp_path) == [0.0, 0.0]


def two_cells(world: World, folder: Path) -> list[bool]:
    """Return what each rank finds of a file that rank 0 creates in the cell before."""
    found: list[bool] = []
    path = folder / "made.txt"
    for _ in range(2):
        with plain_cells(world):
            if not path.exists():
                path.write_text("made")
                found.append(True)
        dist.barrier()
    return found


def test_what_an_earlier_cell_has_made_is_there(tmp_path: Path) -> None:
    assert run_ranks(two_cells, 3, tmp_path) == [[True]] * 3


def consumes_what_is_there(world: World, folder: Path) -> dict[str, Any]:
    """Run the code of one cell, in which rank 1 begins when rank 0 has ended it."""
    ended, found = folder / "ended", {}
    weights, count, log, old, moved = (folder / name for name in ("w.pt", "count", "log", "old", "moved"))
    with plain_cells(world):
        if world.rank == 1:
            assert wait_for(ended.exists, 30)
        found["listed"] = sorted(path.name for path in folder.iterdir() if path.name != "ended")
        found["weights"] = torch.load(weights).tolist()
        weights.unlink()
        found["gone"] = weights.exists(), opens(weights)
        number = int(count.read_text()) + 1
        count.write_text(str(number))
        found["count"] = number, count.stat().st_size
        with log.open("a") as file:
            file.write(" more")
        found["log"] = log.read_text()
        found["old"] = sorted(os.listdir(old)), (old / "a").read_text(), (old / "deep" / "b").read_text()
        shutil.rmtree(old)
        found["removed"] = old.exists(), (old / "a").exists()
        (folder / "dir").rename(folder / "other")
        found["renamed"] = (folder / "other" / "c").read_text(), (folder / "dir").exists()
        shutil.move(folder / "from", moved)
        found["moved"] = moved.read_text(), (folder / "from").exists()
        torch.save(torch.ones(1), folder / "again.pt")
        found["again"] = torch.load(folder / "again.pt").item()
        if world.rank == 0:
            os.close(os.open(ended, os.O_CREAT))
        dist.barrier()
        found["after"] = sorted(path.name for path in folder.iterdir() if path.name != "ended")
    dist.barrier()
    return found


def test_a_rank_that_comes_late_reads_what_the_first_one_has_consumed(tmp_path: Path) -> None:
    torch.save(torch.arange(3.0), tmp_path / "w.pt")
    torch.save(torch.zeros(1), tmp_path / "again.pt")
    (tmp_path / "old" / "deep").mkdir(parents=True)
    (tmp_path / "dir").mkdir()
    texts = {"count": "1", "log": "some", "from": "text", "old/a": "A", "old/deep/b": "B", "dir/c": "C"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    first, late = run_ranks(consumes_what_is_there, 2, tmp_path)
    assert first == late
    assert first == {
        "listed": ["again.pt", "count", "dir", "from", "log", "old", "w.pt"],
        "weights": [0.0, 1.0, 2.0],
        "gone": (False, False),
        "count": (2, 1),
        "log": "some more",
        "old": (["a", "deep"], "A", "B"),
        "removed": (False, False),
        "renamed": ("C", False),
        "moved": ("text", False),
        "again": 1.0,
        "after": ["again.pt", "count", "log", "moved", "other"],
    }


def enters_what_it_makes(world: World, folder: Path) -> str:
    """Make a folder and go there; rank 0 is late."""
    before = os.getcwd()
    with plain_cells(world):
        if world.rank == 0:
            time.sleep(0.3)
        os.makedirs(folder / "run" / "logs", exist_ok=True)
        os.chdir(folder / "run" / "logs")
        found = os.getcwd()
    os.chdir(before)
    return found


def test_a_rank_waits_for_a_folder_that_it_goes_to_until_the_first_one_has_made_it(tmp_path: Path) -> None:
    assert run_ranks(enters_what_it_makes, 2, tmp_path) == [str(tmp_path / "run" / "logs")] * 2


def outcome(operation: Callable[..., object], *args: Any, **kwargs: Any) -> str:
    """Return the result of an operation, or the name of its error."""
    try:
        result = operation(*args, **kwargs)
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, type(error).__name__)
    if hasattr(result, "close"):
        result.close()  # type: ignore[attr-defined]
        return "opened"
    return str(result)


def next_folder(folder: Path) -> str:
    """Make the first folder of a series that does not exist, as notebooks do for their runs."""
    number = 0
    while True:
        try:
            os.mkdir(folder / f"run{number}")
        except FileExistsError:
            number += 1
        else:
            return f"run{number}"


def runs_into_errors(folder: Path) -> list[str]:
    """Return the outcomes of operations, some of which fail."""
    reported: list[object] = []
    there, full, absent, own = (folder / name for name in ("there", "full", "absent", "own"))
    found = [next_folder(folder), next_folder(folder)]
    found += [outcome(open, there, "x"), outcome(open, own, "x"), outcome(open, own, "x"), outcome(open, full, "w")]
    found += [outcome(open, absent / "a", "w"), outcome(open, there / "a", "w"), outcome(open, absent, "r+")]
    found += [outcome(os.mkdir, there), outcome(os.mkdir, full), outcome(os.mkdir, absent / "a")]
    found += [outcome(os.remove, absent), outcome(os.remove, full), outcome(os.rmdir, absent)]
    found += [outcome(os.rmdir, there), outcome(os.rmdir, full), outcome(os.rmdir, folder / "run0")]
    found += [outcome(os.rename, absent, own), outcome(os.replace, own, full), outcome(os.rename, full, own)]
    found += [outcome(os.rename, folder / "run1", folder / "run3"), outcome(os.rename, own, absent / "a")]
    found += [outcome(shutil.rmtree, absent), outcome(shutil.rmtree, there)]
    found += [outcome(shutil.rmtree, absent, True)]
    shutil.rmtree(absent, onerror=lambda *failed: reported.append(failed[1]))
    found += [f"{len(reported)}", str(absent.exists())]
    found += [outcome(os.remove, there), outcome(os.remove, there), outcome(os.mkdir, there), str(there.is_dir())]
    found += [outcome(os.remove, full / "a"), outcome(os.rmdir, full), outcome(os.rmdir, full), str(full.exists())]
    for number in range(2):
        with (folder / "log").open("a") as file:
            file.write(str(number))
    found += [(folder / "log").read_text(), outcome(os.remove, folder / "log"), str(sorted(os.listdir(folder)))]
    return found


def fails_on_ranks(world: World, folder: Path, first: int) -> list[str]:
    """Run these operations in a cell, first on one rank and then on the other."""
    marks = folder.parent / "marks"
    with plain_cells(world):
        if world.rank != first:
            assert wait_for((marks / "ended").exists, 30)
        found = runs_into_errors(folder)
        if world.rank == first:
            os.close(os.open(marks / "ended", os.O_CREAT))
        dist.barrier()
        found.append(outcome(os.rmdir, folder / "run3"))
    return found


def make_folder(folder: Path) -> Path:
    (folder / "full").mkdir(parents=True)
    for name in ("there", "full/a"):
        (folder / name).write_text("text")
    os.mkdir(folder / "run0")
    return folder


@pytest.mark.parametrize("first", [0, 1])
def test_operations_fail_on_every_rank_as_in_one_process(tmp_path: Path, first: int) -> None:
    alone = make_folder(tmp_path / "alone")
    expected = [*runs_into_errors(alone), outcome(os.rmdir, alone / "run3")]
    (tmp_path / "marks").mkdir()
    both = run_ranks(fails_on_ranks, 2, make_folder(tmp_path / "both"), first)
    for found in both:
        assert found == expected
    assert sorted(os.listdir(tmp_path / "both")) == sorted(os.listdir(alone))


def renames_folders(folder: Path) -> list[object]:
    """Return what is found in folders that were there before the cell, and are renamed."""
    data, backup, other = folder / "data", folder / "backup", folder / "other"
    (data / "gone").unlink()
    (data / "new").write_text("new")
    data.rename(backup)
    found: list[object] = [data.exists(), (backup / "a").read_text(), (backup / "new").read_text()]
    found += [sorted(os.listdir(backup)), sorted(path.name for path in backup.glob("*/*")), (backup / "gone").exists()]
    (backup / "deep").rename(folder / "deep")
    found += [(folder / "deep" / "b").read_text(), (backup / "deep").exists(), outcome(os.mkdir, backup)]
    data.mkdir()
    (data / "a").write_text("of the new folder")
    backup.rename(other)
    found += [(data / "a").read_text(), (other / "a").read_text(), backup.exists(), outcome(os.rmdir, other)]
    found += [other.exists(), sorted(os.listdir(folder))]
    return found


def renames_on_ranks(world: World, folder: Path, first: int) -> list[object]:
    """Rename in a cell, first on one rank and then on the other."""
    marks = folder.parent / "marks"
    with plain_cells(world):
        if world.rank != first:
            assert wait_for((marks / "ended").exists, 30)
        found = renames_folders(folder)
        if world.rank == first:
            os.close(os.open(marks / "ended", os.O_CREAT))
        dist.barrier()
        found.append((folder / "deep" / "b").read_text())
    dist.barrier()
    return found


def make_data(folder: Path) -> Path:
    (folder / "data" / "deep").mkdir(parents=True)
    for name in ("a", "gone", "deep/b"):
        (folder / "data" / name).write_text(name)
    return folder


@pytest.mark.parametrize("first", [0, 1])
def test_folders_are_renamed_on_every_rank_as_in_one_process(tmp_path: Path, first: int) -> None:
    alone = make_data(tmp_path / "alone")
    expected = [*renames_folders(alone), "deep/b"]
    (tmp_path / "marks").mkdir()
    for found in run_ranks(renames_on_ranks, 2, make_data(tmp_path / "both"), first):
        assert found == expected
