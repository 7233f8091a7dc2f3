"""Names of a notebook that mean objects of the user's modules."""

from __future__ import annotations

import importlib
import sys
import warnings

import pytest

from accel_nb.pool.sync.imported_attributes import MODULE_END, AssignedAttribute, imported_under_names, read_assigned


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


class Deprecated:
    """A value that warns when it is used, as ``torch.distributed.reduce_op`` does."""

    def __getattribute__(self, name: str) -> object:
        warnings.warn("it is deprecated", FutureWarning, stacklevel=2)
        return super().__getattribute__(name)


def test_attributes_of_a_module_are_not_used_when_those_of_the_notebook_are_looked_for(module):
    module.old = Deprecated()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_assigned([AssignedAttribute("module", None)], {"module": module}) == {}
