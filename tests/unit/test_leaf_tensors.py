"""Views of which torch cannot show a graph."""

import pytest
import torch
from torch import Tensor

from accel_nb.pool.sync.contents.content_kinds import content_of
from accel_nb.runtime.leaf_tensors import grad_fn_of, is_leaf


@pytest.fixture
def view() -> Tensor:
    base = torch.zeros(3)
    with torch.no_grad():
        view = base[:2]
    base += torch.ones(3, requires_grad=True)
    return view


def test_a_view_without_a_graph_to_show_is_no_leaf(view: Tensor) -> None:
    with pytest.raises(RuntimeError, match="no_grad mode"):
        _ = view.grad_fn
    assert not is_leaf(view)
    assert grad_fn_of(view) is None


def test_other_tensors_have_the_state_that_torch_shows() -> None:
    leaf = torch.ones(2, requires_grad=True)
    result = leaf * 2
    assert is_leaf(leaf)
    assert grad_fn_of(leaf) is None
    assert not is_leaf(result)
    assert grad_fn_of(result) is result.grad_fn


def test_such_a_view_is_not_set_in_place(view: Tensor) -> None:
    assert content_of(view) is None
