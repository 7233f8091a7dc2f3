"""The user's own files, and those of Python and of installed packages."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from accel_nb.installed_files import is_of_library, is_of_package, is_of_stdlib


def test_the_standard_library_is_not_a_package() -> None:
    assert is_of_stdlib(json.__file__)
    assert is_of_library(json.__file__)
    assert not is_of_package(json.__file__)
    assert is_of_stdlib("<frozen importlib._bootstrap>")


def test_packages_in_pythons_own_folder() -> None:
    assert is_of_package(torch.__file__)
    assert is_of_library(torch.__file__)
    assert not is_of_stdlib(torch.__file__)


def test_a_file_of_the_user() -> None:
    assert not is_of_library(__file__)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of the import path into which pip has installed a package and a module, as by ``--target``."""
    for file in ("outer/__init__.py", "outer/inner/part.py", "alone.py", "mine.py", "outer_tools/code.py"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    record = tmp_path / "outer-1.0.dist-info" / "RECORD"
    record.parent.mkdir()
    record.write_text(
        "../../bin/outer,sha256=a,1\nouter/__init__.py,sha256=b,0\nouter/inner/part.py,sha256=c,0\n"
        "alone.py,sha256=d,0\nouter-1.0.dist-info/RECORD,,\n"
    )
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    return tmp_path


@pytest.mark.parametrize("file", ["outer/__init__.py", "outer/inner/part.py", "outer/", "alone.py"])
def test_what_pip_has_installed_into_another_folder(folder: Path, file: str) -> None:
    assert is_of_package(f"{folder}/{file}")


@pytest.mark.parametrize("file", ["mine.py", "outer_tools/code.py", "outer.py"])
def test_files_of_the_user_beside_installed_ones(folder: Path, file: str) -> None:
    assert not is_of_package(f"{folder}/{file}")
