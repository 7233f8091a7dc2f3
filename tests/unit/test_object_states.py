"""Objects whose class defines ``__getstate__``."""

import pytest

from accel_nb.pool.sync.contents.content_kinds import content_of, set_content
from accel_nb.pool.sync.contents.object_states import ObjectState, has_own_state, unsent_attributes


def as_of_the_notebook(kind):
    kind.__getstate__.__module__ = "__main__"
    return kind


@as_of_the_notebook
class Record:
    """Holds a file, which its state lacks, and an owner, which is None in it."""

    def __init__(self):
        self.values, self.file, self.owner = [], object(), object()

    def __getstate__(self):
        return {"values": list(self.values), "owner": None}

    def __setstate__(self, state):
        if state["values"] == ["bad"]:
            raise ValueError("bad")
        self.__dict__.update(state, file=None)


def state_of(record) -> ObjectState:
    found = content_of(record)
    assert found is not None
    return found[1]


def test_a_state_is_set_as_if_the_object_was_unpickled():
    own, other = Record(), Record()
    vars(own)["extra"] = 1
    other.values.append(1)
    set_content(own, state_of(other))
    assert vars(own) == {"values": [1], "file": None, "owner": None}


def test_what_the_state_leaves_out_is_kept_unless_the_other_side_has_set_it():
    own, other = Record(), Record()
    other.file = None
    assert unsent_attributes(own, state_of(other)) == {"file": own.file}
    other.owner = None
    assert unsent_attributes(own, state_of(other)) == {"file": own.file, "owner": own.owner}


def test_a_state_that_cannot_be_set_changes_nothing():
    own = Record()
    before = dict(vars(own))
    with pytest.raises(ValueError, match="bad"):
        set_content(own, ObjectState({"values": ["bad"]}, frozenset()))
    assert vars(own) == before


def test_an_object_whose_state_cannot_be_read_has_no_content():
    class Broken:
        def __getstate__(self):
            raise RuntimeError("no state")

    assert content_of(as_of_the_notebook(Broken)()) is None


class Library:
    """A class of a library, without ``__setstate__``."""

    def __init__(self, value):
        self.value, self.cache = value, object()

    def __getstate__(self):
        return {"value": self.value}


def test_an_object_of_a_library_keeps_nothing_that_its_state_leaves_out():
    own, other = Library(1), Library(2)
    assert unsent_attributes(own, state_of(other)) == {}
    set_content(own, state_of(other))
    assert vars(own) == {"value": 2}


def test_objects_without_a_state_of_their_own():
    assert has_own_state(Record())
    assert has_own_state(Library(1))
    assert not has_own_state(object())
