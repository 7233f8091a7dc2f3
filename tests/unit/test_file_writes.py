from __future__ import annotations

import os
import tempfile
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
