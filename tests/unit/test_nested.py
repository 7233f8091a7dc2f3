from collections import OrderedDict, UserDict, namedtuple
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from accel_nb.runtime.tensors.nested import (
    concat_batches,
    find_tensors,
    first_batch_size,
    map_tensors,
    slice_batch,
    to_device,
)

Point = namedtuple("Point", "x y")


@dataclass(frozen=True)
class Frozen:
    images: torch.Tensor
    label: str


class Keyed(OrderedDict):
    """A mapping with an attribute beside its items."""

    def __init__(self, secret=None):
        super().__init__()
        self.secret = secret


def test_every_kind_of_container_is_walked_and_rebuilt():
    keyed = Keyed("s")
    keyed["t"] = torch.ones(2)
    nested = {
        "tuple": (torch.ones(1), 3),
        "list": [torch.ones(1), "text"],
        "named": Point(torch.ones(1), None),
        "data": Frozen(torch.ones(2), "cat"),
        "keyed": keyed,
        "user": UserDict(a=torch.ones(1)),
        "proxy": MappingProxyType({"a": torch.ones(1)}),
    }

    doubled = map_tensors(lambda tensor: tensor * 2, nested)

    assert [tensor[0].item() for tensor in find_tensors(doubled)] == [2.0] * 7
    assert [tensor[0].item() for tensor in find_tensors(nested)] == [1.0] * 7
    assert {name: type(value) for name, value in doubled.items()} == {n: type(v) for n, v in nested.items()}
    assert doubled["keyed"].secret == "s"
    assert doubled["data"].label == "cat"


class Attributes(dict):
    """A dict whose items are its attributes."""

    def __init__(self, **items):
        super().__init__(items)
        self.__dict__ = self


class Result(dict):
    """A dict whose constructor sets its items as attributes too."""

    def __init__(self, **items):
        super().__init__(items)
        for name, value in items.items():
            setattr(self, name, value)


class Batch(MutableMapping):
    """A mapping that holds its items in an attribute."""

    def __init__(self, **items):
        self.held = items

    def __getitem__(self, key):
        return self.held[key]

    def __setitem__(self, key, value):
        self.held[key] = value

    def __delitem__(self, key):
        del self.held[key]

    def __iter__(self):
        return iter(self.held)

    def __len__(self):
        return len(self.held)


@pytest.mark.parametrize("kind", [Attributes, Result])
def test_attributes_that_are_items_are_replaced_with_them(kind):
    given = kind(x=torch.ones(2), name="one")

    doubled = map_tensors(lambda tensor: tensor * 2, given)

    assert type(doubled) is kind
    assert (doubled["x"].tolist(), doubled.x.tolist(), doubled.name) == ([2.0, 2.0], [2.0, 2.0], "one")
    assert (given["x"].tolist(), given.x.tolist()) == ([1.0, 1.0], [1.0, 1.0])
    doubled.name = "two"
    assert doubled["name"] == ("two" if kind is Attributes else "one")


def test_a_mapping_that_holds_its_items_in_an_attribute_is_not_changed():
    given = Batch(x=torch.ones(2))

    doubled = map_tensors(lambda tensor: tensor * 2, given)

    assert (doubled["x"].tolist(), given["x"].tolist()) == ([2.0, 2.0], [1.0, 1.0])


def test_a_field_without_a_value_stays_without_one():
    @dataclass
    class Cached:
        x: torch.Tensor
        sums: torch.Tensor = field(init=False)

    doubled = map_tensors(lambda tensor: tensor * 2, Cached(torch.ones(2)))

    assert doubled.x.tolist() == [2.0, 2.0]
    assert not hasattr(doubled, "sums")
    assert first_batch_size(doubled) == 2


def test_a_nested_tensor_has_as_many_samples_as_tensors():
    batch = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)]), ["a", "b"]

    assert first_batch_size(batch) == 2


def test_a_mapping_that_cannot_be_copied_becomes_a_dict():
    class Closed(UserDict):
        def __copy__(self):
            raise TypeError

    assert map_tensors(lambda tensor: tensor * 2, Closed(a=torch.ones(1))) == {"a": 2}


def test_a_pair_of_tensors_stays_a_pair():
    assert map_tensors(lambda tensor: tensor + 1, (torch.zeros(1), torch.ones(1))) == (1, 2)


def test_tensors_on_the_device_are_not_copied():
    pair = (torch.ones(2), {"a": torch.ones(2)})

    moved = to_device(pair, "cpu", non_blocking=True)

    assert moved[0] is pair[0]
    assert moved[1]["a"] is pair[1]["a"]


def test_tensors_move_to_another_device():
    moved = to_device([torch.ones(2), "name", Point(torch.ones(1), 1)], "meta")

    assert [tensor.device.type for tensor in find_tensors(moved)] == ["meta", "meta"]
    assert moved[1] == "name"


def test_a_dict_whose_attributes_are_keys_is_moved_by_its_items():
    class Keys(dict):
        __getattr__ = dict.__getitem__

    moved = to_device(Keys(x=torch.ones(2, device="cpu")), "meta")

    assert moved.x.is_meta


def test_an_object_that_can_move_itself_does():
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    assert isinstance(to_device(packed, "cpu"), PackedSequence)

    class OldStyle:
        def to(self, device):
            return f"on {device}"

    assert to_device({"a": OldStyle()}, "meta") == {"a": "on meta"}


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (torch.ones(3, 2), 3),
        ((torch.tensor(1.0), torch.ones(4)), 4),
        ({"names": ["a", "b"], "x": torch.ones(2, 5)}, 2),
        (["a", "b", "c"], 3),
        (np.ones((6, 2)), 6),
        (Frozen(torch.ones(2), "x"), 2),
        (torch.tensor(1.0), None),
        ({"a": "text"}, None),
        (3, None),
    ],
)
def test_the_size_of_a_batch_is_its_first_axis(batch, size):
    assert first_batch_size(batch) == size


def test_a_slice_takes_the_samples_of_every_field():
    batch = {
        "x": torch.arange(8).view(4, 2),
        "y": np.arange(4),
        "names": ["a", "b", "c", "d"],
        "fields": [torch.arange(4), torch.arange(4) * 10],
        "scalar": torch.tensor(7),
        "table": torch.ones(9),
        "boxes": [torch.ones(1, 4), torch.ones(2, 4), torch.ones(0, 4), torch.ones(3, 4)],
        "words": [["a", "b", "c", "d"], ["e", "f", "g", "h"]],
    }

    part = slice_batch(batch, 1, 3)

    assert part["x"].tolist() == [[2, 3], [4, 5]]
    assert part["y"].tolist() == [1, 2]
    assert part["names"] == ["b", "c"]
    assert [field.tolist() for field in part["fields"]] == [[1, 2], [10, 20]]
    assert part["scalar"].item() == 7
    assert part["table"].shape == (9,)
    assert [box.shape[0] for box in part["boxes"]] == [2, 0]
    assert part["words"] == [["b", "c"], ["f", "g"]]


def test_a_slice_of_tensors_is_a_view():
    x, y = torch.arange(4), torch.arange(4)

    part = slice_batch((x, y), 2, 4)

    assert isinstance(part, tuple)
    assert part[0].data_ptr() == x[2:].data_ptr()


def test_what_has_no_samples_is_kept_whole():
    assert slice_batch(3, 0, 1) == 3


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_joining_undoes_slicing(cut):
    batch = {
        "x": torch.arange(8).view(4, 2),
        "y": np.arange(4),
        "names": ("a", "b", "c", "d"),
        "pair": Point(torch.arange(4), "same"),
        "boxes": [torch.ones(1, 4), torch.ones(2, 4), torch.ones(0, 4), torch.ones(3, 4)],
        "scalar": torch.tensor(7),
    }

    joined = concat_batches([slice_batch(batch, 0, cut), slice_batch(batch, cut, 4)])

    assert joined["x"].tolist() == batch["x"].tolist()
    assert joined["y"].tolist() == [0, 1, 2, 3]
    assert joined["names"] == batch["names"]
    assert joined["pair"].x.tolist() == [0, 1, 2, 3]
    assert joined["pair"].y == "same"
    assert [box.shape[0] for box in joined["boxes"]] == [1, 2, 0, 3]
    assert joined["scalar"].item() == 7


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([torch.ones(2, 3), torch.ones(2, 4)], "another shape"),
        ([{"a": torch.ones(1)}, {"b": torch.ones(1)}], "another structure"),
        ([(torch.ones(1), 1), [torch.ones(1), 1]], "another structure"),
        ([(torch.ones(1), 1), (torch.ones(1), 2)], "differ from batch to batch"),
        ([torch.tensor(1.0), torch.tensor(1.0)], "without a first axis"),
    ],
)
def test_batches_that_do_not_fit_are_not_joined(batches, message):
    with pytest.raises(ValueError, match=message):
        concat_batches(batches)
