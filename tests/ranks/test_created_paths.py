"""What the first rank has created is absent for a rank that has not got there, until the ranks have met."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy
import torch.distributed as dist

from accel_nb.runtime.world import World
from tests.conftest import wait_for
from tests.ranks.launch import run_ranks
from tests.ranks.test_plain_cells import plain_cells


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
