"""Hints below the errors of cells."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from accel_nb.accelerator.plain_cells.error_hints import explain_error
from accel_nb.errors import MisuseError
from accel_nb.runtime.distributed.sharded import FlatShard, register_flat_shard


def error_of(value: Tensor, kind: type[Exception] | None) -> Exception:
    """Return the error of a function that has a tensor: one of ``kind``, or None: of an attribute of the tensor."""

    def fail(tensor: Tensor) -> None:
        if kind is not None:
            raise kind("sizes differ")
        getattr(tensor, "importance")  # noqa: B009

    with pytest.raises(kind or AttributeError) as caught:
        fail(value)
    return caught.value


@pytest.mark.parametrize("kind", [RuntimeError, TypeError, None])
def test_an_error_of_code_that_has_a_part_of_a_tensor_gets_the_way_out(kind: type[Exception] | None):
    part = register_flat_shard(torch.ones(2), FlatShard((4,), ((0, 2), (2, 2)), 0))
    assert "`--strategy ddp`" in (explain_error(error_of(part, kind), None) or "")


@pytest.mark.parametrize("kind", [KeyError, torch.OutOfMemoryError, MisuseError])
def test_errors_of_other_causes_get_none(kind: type[Exception]):
    part = register_flat_shard(torch.ones(2), FlatShard((4,), ((0, 2), (2, 2)), 0))
    assert explain_error(error_of(part, kind), None) is None


def test_an_error_of_code_with_whole_tensors_gets_none():
    assert explain_error(error_of(torch.ones(2), RuntimeError), None) is None


def test_an_error_of_a_backward_pass_that_names_sharded_tensors_gets_the_way_out():
    error = RuntimeError("aten.add.Tensor got mixed torch.Tensor and DTensor")
    assert "`--strategy ddp`" in (explain_error(error, None) or "")
