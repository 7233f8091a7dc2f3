"""Padding to the longest sample of a batch."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from accel_nb.data.collate import PaddingCollate
from accel_nb.errors import MisuseError


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    multiple_of=st.integers(1, 4),
    side=st.sampled_from(["right", "left"]),
)
def test_every_value_stays_and_the_rest_is_padding(lengths, multiple_of, side):
    samples = [torch.arange(1, length + 1) for length in lengths]

    batch, mask = PaddingCollate(pad=-1, multiple_of=multiple_of, mask="mask", side=side)(samples)

    assert batch.shape == mask.shape
    assert batch.shape[1] % multiple_of == 0
    assert 0 <= batch.shape[1] - max(lengths) < multiple_of
    for row, kept, sample in zip(batch, mask, samples, strict=True):
        assert row[kept.bool()].tolist() == sample.tolist()
        assert set(row[~kept.bool()].tolist()) <= {-1}
        edge = kept.flip(0) if side == "left" else kept
        assert edge.tolist() == sorted(edge.tolist(), reverse=True)


def test_fields_of_dicts_have_pads_of_their_own_and_a_mask():
    samples = [
        {"input_ids": [5, 6, 7], "labels": np.array([1, 2, 3]), "id": 0, "text": "a"},
        {"input_ids": [8], "labels": np.array([4]), "id": 1, "text": "b"},
    ]

    batch = PaddingCollate(pad={"labels": -100}, mask="attention_mask", multiple_of=2)(samples)

    assert batch["input_ids"].tolist() == [[5, 6, 7, 0], [8, 0, 0, 0]]
    assert batch["labels"].tolist() == [[1, 2, 3, -100], [4, -100, -100, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]]
    assert batch["id"].tolist() == [0, 1]
    assert batch["text"] == ["a", "b"]


def test_tuples_named_tuples_and_lists_keep_their_kind():
    class Pair(NamedTuple):
        x: torch.Tensor
        y: int

    pairs = [Pair(torch.ones(2, 3), 1), Pair(torch.ones(1, 3), 2)]

    batch = PaddingCollate()(pairs)
    masked = PaddingCollate(mask="mask")([tuple(pair) for pair in pairs])
    listed = PaddingCollate()([[pair.x, pair.y] for pair in pairs])

    assert isinstance(batch, Pair)
    assert batch.x.shape == (2, 2, 3)
    assert batch.x[1, 1].tolist() == [0, 0, 0]
    assert batch.y.tolist() == [1, 2]
    assert isinstance(masked, tuple)
    assert masked[2].tolist() == [[1, 1], [1, 0]]
    assert isinstance(listed, list)
    assert torch.equal(listed[0], batch.x)


def test_the_mask_may_be_of_another_field_and_only_some_are_padded():
    samples = [{"a": torch.ones(3), "b": torch.ones(1), "c": torch.ones(2)} for _ in range(2)]
    samples[1]["b"] = torch.ones(2)

    batch = PaddingCollate(mask="m", mask_of="b", only=["a", "b"], multiple_of=4)(samples)

    assert batch["m"].tolist() == [[1, 0, 0, 0], [1, 1, 0, 0]]
    assert batch["a"].shape == (2, 4)
    assert batch["c"].shape == (2, 2)


def test_what_has_no_sequence_is_collated_as_by_torch():
    assert PaddingCollate()([1.5, 2.5]).tolist() == [1.5, 2.5]
    assert PaddingCollate()([{"x": 1}, {"x": 2}])["x"].tolist() == [1, 2]
    assert PaddingCollate()([{"x": []}, {"x": [1.5]}])["x"].tolist() == [[0.0], [1.5]]


def test_it_works_in_worker_processes():
    loader = DataLoader([[1], [2, 3], [4, 5, 6]], batch_size=2, collate_fn=PaddingCollate(), num_workers=1)

    assert [batch.tolist() for batch in loader] == [[[1, 0], [2, 3]], [[4, 5, 6]]]


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([torch.ones(2, 3), torch.ones(2, 4)], r"field 0 cannot be padded.*\(2, 3\) float32, \(2, 4\) float32"),
        ([torch.ones(2), torch.ones(2).long()], "float32.*int64"),
        ([{"x": [1]}, {"y": [1]}], r"sample 1 of a batch has the fields \['y'\]"),
        ([{"x": []}, {"x": ["a"]}], "field 'x' cannot be padded: in sample 1"),
        ([(1, 2), (1,)], "sample 1 of a batch has 1 items"),
    ],
)
def test_samples_that_do_not_fit_are_named(samples, message):
    with pytest.raises(MisuseError, match=message):
        PaddingCollate()(samples)


@pytest.mark.parametrize("options", [{"multiple_of": 0}, {"multiple_of": 1.5}, {"side": "top"}, {"mask_of": "x"}])
def test_options_that_cannot_be_are_refused(options):
    with pytest.raises(MisuseError, match=next(iter(options))):
        PaddingCollate(**options)


def test_a_mask_of_a_field_that_is_not_there_is_an_error():
    with pytest.raises(MisuseError, match=r"mask_of='z'.*fields are x"):
        PaddingCollate(mask="m", mask_of="z")([{"x": [1]}])


def test_a_mask_replaces_no_field():
    with pytest.raises(MisuseError, match="have a field of this name"):
        PaddingCollate(mask="x")([{"x": [1]}])


def test_whole_numbers_are_padded_with_one():
    with pytest.raises(MisuseError, match="has whole numbers"):
        PaddingCollate(pad=0.5)([[1], [1, 2]])


@pytest.mark.parametrize("side", ["right", "left"])
def test_gradients_reach_the_samples(side):
    samples = [torch.ones(1, requires_grad=True), torch.ones(2, requires_grad=True)]
    PaddingCollate(side=side)(samples).sum().backward()
    assert [sample.grad.tolist() for sample in samples] == [[1], [1, 1]]
