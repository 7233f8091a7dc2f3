"""Outputs that overlap in memory: which do, and how one is a view of another with more rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from accel_nb.accelerator.model_division.overlapping_outputs import find_view, find_views, overlapping_pairs

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "a column": lambda h: h[:, 0],
    "the last of the last": lambda h: h[:, -1, 2],
    "a slice": lambda h: h[:, 1:4],
    "every second": lambda h: h[..., 1::2],
    "transposed": lambda h: h.transpose(1, 2),
    "with dims of one element": lambda h: h[:, None, 2:3],
    "detached": lambda h: h.detach(),
}


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", VIEWS)
def test_views_of_rows_are_found_and_made_of_more_rows(name: str, dim: int) -> None:
    own, whole = torch.randn(3, 5, 4), torch.randn(7, 5, 4)
    base = own.movedim(0, dim)
    view = find_view(VIEWS[name](own), 0, base, dim)
    assert view is not None
    made = view.of(whole.movedim(0, dim).contiguous())
    assert torch.equal(made, VIEWS[name](whole))
    assert made._base is not None or not view.has_gradient


@pytest.mark.parametrize("other", [lambda h: h.clone(), lambda h: h[1:], lambda h: h[0], lambda h: h.flatten(1)])
def test_other_tensors_are_no_views_of_all_rows(other: Callable[[Tensor], Tensor]) -> None:
    own = torch.randn(3, 5, 4)
    assert find_view(other(own), 0, own, 0) is None


def test_a_view_whose_gradient_does_not_pass_through_the_base_is_none() -> None:
    h = torch.randn(3, 4, requires_grad=True) * 1
    assert find_view(h[:, 0], 0, h.detach(), 0) is None
    assert find_view(h[:, 0], 0, h, 0) is not None


def test_views_with_a_gradient_are_made_only_if_no_other_output_may_depend_on_them() -> None:
    h = torch.randn(3, 4, requires_grad=True) * 1
    first, fixed = h[:, 0], h.detach()
    assert find_views([(first, 0), (h, 0), (fixed, 0)]).keys() == {id(first), id(fixed)}
    assert find_views([(first, 0), (h, 0), (fixed, 0), (first * 2, 0)]).keys() == {id(fixed)}


def test_tensors_overlap_that_have_elements_in_common() -> None:
    h = torch.randn(4, 5, 6)
    left, right = h.chunk(2, -1)
    tensors = [h, left, right, h[:, ::2], h[:, 1::2], h.clone(), h[:, 0]]
    of_whole = [(0, number) for number in (1, 2, 3, 4, 6)]
    of_parts = [(1, 3), (1, 4), (1, 6), (2, 3), (2, 4), (2, 6), (3, 6)]
    assert overlapping_pairs(tensors) == of_whole + of_parts
