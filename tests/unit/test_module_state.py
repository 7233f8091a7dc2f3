"""Snapshots of what a forward pass may change."""

import pytest
import torch

from accel_nb.accelerator.model_division.module_state import ModuleSnapshot


class Holder(torch.nn.Module):
    value: torch.Tensor

    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("value", value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.float8_e4m3fn])
@pytest.mark.parametrize(("before", "after"), [(float("nan"), 0.0), (0.0, float("nan")), (2.0, 1.0)])
def test_a_buffer_that_was_or_becomes_nan_is_restored(dtype: torch.dtype, before: float, after: float) -> None:
    model = Holder(torch.tensor([before, 1.0]).to(dtype))
    snapshot = ModuleSnapshot(model, shards_params=False)
    assert not snapshot.changes().values
    model.value[0] = after
    assert list(snapshot.restore().values) == ["value"]
    assert str(model.value.to(torch.complex64).tolist()) == str([complex(before), 1 + 0j])


def test_infinity_is_not_the_largest_number() -> None:
    model = Holder(torch.tensor([float("inf")]))
    snapshot = ModuleSnapshot(model, shards_params=False)
    model.value.fill_(torch.finfo(torch.float32).max)
    snapshot.restore()
    assert model.value.isinf().all()


def test_a_buffer_of_another_dtype_is_restored() -> None:
    model = Holder(torch.ones(2))
    snapshot = ModuleSnapshot(model, shards_params=False)
    model.value.data = torch.zeros(2, dtype=torch.float64)
    snapshot.restore()
    assert torch.equal(model.value, torch.ones(2))


def test_the_order_of_a_dict_is_restored() -> None:
    model = Holder(torch.ones(1))
    model.recent = {"a": 1, "b": 2}  # pyright: ignore
    snapshot = ModuleSnapshot(model, shards_params=False)
    model.recent["a"] = model.recent.pop("a")  # pyright: ignore
    snapshot.restore()
    assert list(model.recent) == ["a", "b"]  # pyright: ignore


def test_a_nested_tensor_is_left_alone() -> None:
    model = Holder(torch.ones(1))
    model.parts = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])  # pyright: ignore
    snapshot = ModuleSnapshot(model, shards_params=False)
    model.value.zero_()
    assert list(snapshot.restore().values) == ["value"]
