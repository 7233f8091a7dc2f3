"""The folder for the temporary files of a worker."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from accel_nb.runtime.process import temporary_files


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(temporary_files.tempfile, "gettempdir", lambda: str(tmp_path))
    return tmp_path / f"accel_nb_{os.getuid()}_{os.getpid()}"


def test_the_folder_is_the_users_alone_and_is_removed_with_its_files(folder: Path):
    for _ in range(2):
        assert temporary_files.make_temporary_folder(os.getpid()) == str(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    (folder / "file").write_text("x")
    temporary_files.remove_temporary_folder(os.getpid())
    assert not folder.exists()
    temporary_files.remove_temporary_folder(os.getpid())


def test_a_folder_that_others_may_write_to_is_not_used(folder: Path):
    folder.mkdir()
    folder.chmod(0o777)
    assert temporary_files.make_temporary_folder(os.getpid()) is None


def test_a_link_is_not_followed(folder: Path, tmp_path: Path):
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    (other / "file").write_text("x")
    folder.symlink_to(other)
    assert temporary_files.make_temporary_folder(os.getpid()) is None
    temporary_files.remove_temporary_folder(os.getpid())
    assert (other / "file").exists()
