from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from accel_nb.accelerator.plain_cells.files.file_writes import PrivateFiles


@pytest.fixture
def files() -> Iterator[PrivateFiles]:
    found = PrivateFiles()
    found.begin(None)
    with found.writing_for_cell():
        yield found
    found.discard()


def open_hdf5(file: list, name: str, mode: str, driver: None) -> None:
    """Open a file as h5py does, which opens one by its name."""
    with open(name, {"a": "a+", "w-": "x+"}.get(mode, mode)) as opened:
        file.append(opened.read())


def test_an_hdf5_file_that_cannot_be_opened_is_absent(files: PrivateFiles, tmp_path: Path, monkeypatch):
    init, path = files.make_hdf5_init(open_hdf5), tmp_path / "data.h5"
    monkeypatch.setattr(os, "stat", files.make_status(os.stat))
    for mode in ("r+", "unknown"):
        with pytest.raises((FileNotFoundError, ValueError)):
            init([], path, mode)
        assert not path.exists()
    init([], path, "w-")
    assert path.exists()
    with pytest.raises(FileExistsError):
        init([], path, "w-")
    assert path.exists()
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    "arguments", [("mkdtemp", ".txt", "pre"), ("mkstemp", ".txt"), ("NamedTemporaryFile", "w", -1, "utf8")]
)
def test_temporary_files_are_in_the_folder_of_the_process(files: PrivateFiles, tmp_path: Path, arguments, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    name, *others = arguments
    make = files.make_temporary(getattr(tempfile, name))
    folder = f"accel_nb_{os.getuid()}_{os.getpid()}"
    for given in ((), (None,)):  # as a keyword, and as TemporaryDirectory passes it
        made = make(*others, *given) if name == "mkdtemp" else make(*others)
        path = made[1] if isinstance(made, tuple) else getattr(made, "name", made)
        assert Path(path).parent == tmp_path / folder
    own = tmp_path / "own"
    own.mkdir()
    made = make(*others, dir=str(own))
    assert Path(made[1] if isinstance(made, tuple) else getattr(made, "name", made)).parent == own


class CreatingRank0:
    """Changes of rank 0, which creates a file while another rank looks for it."""

    def __init__(self, path: Path) -> None:
        self.path, self.num_calls = str(path), 0

    def has_paths(self) -> bool:
        return True

    def find(self, path: str) -> str | None:
        if path == self.path:
            self.num_calls += 1
            if self.num_calls == 3:  # by the first two this rank finds that it may write there
                Path(path).write_text("rank 0")
        return None if path == self.path and self.num_calls >= 3 else path

    def is_find_certain(self, path: str) -> bool:
        return True

    def use_present(self, path: str) -> None:
        pass


@pytest.mark.parametrize("num_calls", [2, 3, 4])
def test_a_file_that_rank_0_creates_as_this_rank_opens_it_is_empty(files: PrivateFiles, tmp_path: Path, num_calls):
    path = tmp_path / "log.txt"
    changed = CreatingRank0(path)
    changed.num_calls = 3 - num_calls
    files.changed = changed  # type: ignore[assignment]
    with files.make_open(open)(path, "a+") as file:
        file.seek(0)
        assert file.read() == ""
    assert changed.num_calls >= 3


def test_a_folder_is_listed_in_the_order_of_the_file_system(files: PrivateFiles, tmp_path: Path):
    names = [f"{number}.txt" for number in range(20)]
    for name in names[::2]:
        files.make_open(open)(tmp_path / name, "w").close()
    for name in names:  # rank 0 makes all of them
        (tmp_path / name).touch()
    expected = os.listdir(tmp_path)
    assert files.make_listdir(os.listdir)(tmp_path) == expected
    with files.make_scandir(os.scandir)(tmp_path) as scan:
        assert [entry.name for entry in scan] == expected


def test_a_folder_is_listed_when_rank_0_has_made_what_this_rank_has(files: PrivateFiles, tmp_path: Path):
    names = [f"{number}.txt" for number in range(300)]  # more than a rank keeps versions of
    for name in names:
        files.make_open(open)(tmp_path / name, "w").close()
    rank_0 = threading.Thread(target=lambda: [(tmp_path / name).touch() for name in names])
    rank_0.start()
    listed = files.make_listdir(os.listdir)(tmp_path)
    rank_0.join()
    assert listed == os.listdir(tmp_path)
