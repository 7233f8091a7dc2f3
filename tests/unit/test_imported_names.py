"""Names of a notebook that mean objects of the user's modules."""

from __future__ import annotations

import importlib
import sys

import pytest

from accel_nb.pool.sync.imported_attributes import MODULE_END, AssignedAttribute, imported_under_names


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "own_settings.py").write_text("options = {}\nrate = 0.1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("own_settings")
    del sys.modules["own_settings"]


def test_names_of_containers_of_a_module_are_found_and_copies_are_not(module):
    namespace = {"options": module.options, "rate": module.rate, "other": {}}
    assert imported_under_names(namespace, namespace) == [AssignedAttribute(f"own_settings{MODULE_END}", "options")]
    assert not imported_under_names(["options"], {"options": {}})


def test_the_builtins_that_all_modules_share_are_not_taken_for_an_import(module):
    namespace = {"__builtins__": vars(module)["__builtins__"]}
    assert not imported_under_names(namespace, namespace)
