"""The arrangement of ranks, and the choice of the layers that are divided."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from accel_nb.errors import ConfigError, MisuseError
from accel_nb.runtime.distributed.layer_exchange import LayerExchange
from accel_nb.runtime.mesh import Mesh, arrange_mesh
from accel_nb.strategies.base import Refusal
from accel_nb.strategies.tensor_parallel.divided_layers import LayerDivision, LayersToDivide
from accel_nb.strategies.tensor_parallel.plan import DivisionPlan, plan_division


def test_every_coordinate_is_held_once_and_layers_lie_next_to_each_other() -> None:
    places = [arrange_mesh(rank, 12, tp=2, shard=3) for rank in range(12)]
    assert places[0].shape == (1, 2, 3, 1, 2)
    assert len({place.coordinates for place in places}) == 12
    for place in places:
        assert place.ranks_along("tp") == (place.rank // 2 * 2, place.rank // 2 * 2 + 1)
        data_ranks = place.ranks_along("dp_replicate", "dp_shard")
        assert data_ranks == tuple(other.rank for other in places if other.index("tp") == place.index("tp"))
        assert [places[rank].data_index for rank in data_ranks] == list(range(place.num_data))
        assert place.counts_samples == (place.rank % 2 == 0)
    assert places[7].describe() == "dp_replicate 2 x dp_shard 3 x tp 2"
    assert places[7].describe_rank() == "dp 3, tp 1"
    assert Mesh().coordinates == (0, 0, 0, 0, 0)


def test_groups_along_dimensions_divide_the_world() -> None:
    mesh = arrange_mesh(0, 16, pp=2, cp=2, tp=2, shard=2)
    assert mesh.describe() == "pp 2 x dp_shard 2 x cp 2 x tp 2"
    for dimensions in (("pp",), ("dp_shard", "cp"), ("dp_replicate", "dp_shard", "cp"), ("pp", "tp")):
        groups = mesh.groups_along(*dimensions)
        assert sorted(rank for group in groups for rank in group) == list(range(16))
        for group in groups:
            places = [Mesh(rank, *mesh.shape) for rank in group]
            assert [place.index(*dimensions) for place in places] == list(range(len(group)))
            assert all(place.ranks_along(*dimensions) == group for place in places)
    assert mesh.ranks_along("pp") == (0, 8)
    assert mesh.ranks_along("dp_shard", "cp") == (0, 2, 4, 6)
    assert Mesh(13, *mesh.shape).describe_rank() == "dp 1, pp 1, cp 0, tp 1"


@pytest.mark.parametrize(
    ("tp", "shard", "problem"),
    [(4, None, "mesh.tp is 4, which does not divide the 6 workers; use one of 1, 2, 3, 6"),
     (2, 2, "fsdp.hybrid_shard_size is 2, which does not divide the 3 workers that remain of 6 after mesh.tp 2"),
     (1, 4, "fsdp.hybrid_shard_size is 4, which does not divide the 6 workers; use one of 1, 2, 3, 6")],
)  # fmt: skip
def test_degrees_that_do_not_divide_are_refused(tp: int, shard: int | None, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        arrange_mesh(0, 6, tp=tp, shard=shard)


def divided(model: nn.Module) -> DivisionPlan:
    plan = plan_division(model, 2)
    assert isinstance(plan, DivisionPlan)
    return plan


def test_two_layers_are_divided_only_if_what_lies_between_them_acts_on_each_number() -> None:
    for between in (nn.ReLU(), nn.Identity(), nn.Dropout(0.5)):
        plan = divided(nn.Sequential(nn.Linear(4, 8), between, nn.Linear(8, 4)))
        assert [(group.columns, group.rows) for group in plan.groups] == [(("0",), ("2",))]
        assert plan.groups[0].draws == isinstance(between, nn.Dropout)
    for between in (nn.LayerNorm(8), nn.LayerNorm(8, elementwise_affine=False), nn.Softmax(-1), nn.BatchNorm1d(5)):
        plan = divided(nn.Sequential(nn.Linear(4, 8), between, nn.Linear(8, 4)))
        assert not plan.groups
        assert "Sequential" in plan.not_divided


class Gated(nn.Module):
    """A feed-forward module with a gate; what it prints must not be seen, and its hooks must not run."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        print("forward", x.shape)
        return self.w2(torch.nn.functional.silu(self.w1(x)) * self.w3(x))


def test_a_trial_leaves_no_trace(capsys: pytest.CaptureFixture[str]) -> None:
    model = Gated()
    before, state = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    [group] = divided(model).groups
    assert (set(group.columns), group.rows) == ({"w1", "w3"}, ("w2",))
    assert capsys.readouterr().out == ""
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(value.grad is None for value in model.parameters())
    assert type(model.w1) is nn.Linear
    called: list[nn.Module] = []
    model.w1.register_forward_hook(lambda module, *_: called.append(module))
    assert not divided(model).groups
    assert not called


class Heads(nn.Module):
    """Two projections with a number of heads."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.values, self.out = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.values(x).view(*x.shape[:2], self.num_heads, -1).cumsum(1)
        return self.out(mixed.softmax(-1).reshape(x.shape[0], x.shape[1], -1))


class ShortNamedHeads(nn.Module):
    """The same with a number of heads whose name does not say what it is."""

    def __init__(self) -> None:
        super().__init__()
        self.depth, self.h = 3, 2
        self.values, self.out = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.values(x).view(*x.shape[:2], self.h, -1).cumsum(1)
        return self.out(mixed.softmax(-1).reshape(x.shape[0], x.shape[1], -1))


def test_a_number_of_heads_is_found_under_any_name() -> None:
    assert divided(ShortNamedHeads()).groups[0].attributes == ("h",)


def test_heads_stay_whole() -> None:
    assert divided(Heads(2)).groups[0].attributes == ("num_heads",)
    refused = plan_division(nn.ModuleList([Heads(3)]), 2)
    assert isinstance(refused, Refusal)
    assert str(refused) == "0.num_heads of a Heads is 3, which mesh.tp 2 does not divide: use mesh.tp 1, 3"


class Tied(nn.Module):
    """Two layers with one weight, which has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


def test_tied_weights_stay_whole() -> None:
    assert not divided(Tied()).groups


class Scaled(nn.Module):
    """Two layers with a learned number between them, of which parts would have parts of the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.scale, self.down = nn.Linear(4, 8), nn.Parameter(torch.ones(1)), nn.Linear(8, 4)
        nn.init.zeros_(self.down.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh() * self.scale)


def test_weights_of_zero_hide_no_difference() -> None:
    assert not divided(Scaled()).groups


class Acting(nn.Module):
    """Two layers with a function between them; ``centers`` makes it another one in training."""

    def __init__(self, act: Any, *, centers: bool = False) -> None:
        super().__init__()
        self.fc1, self.fc2, self.act, self.centers = nn.Linear(4, 8), nn.Linear(8, 4), act, centers

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.act(self.fc1(x))
        if self.centers and self.training:
            hidden = hidden - hidden.mean(-1, keepdim=True)
        return self.fc2(hidden)


@pytest.mark.parametrize(
    ("first", "second"),
    [(torch.relu, lambda x: x.softmax(-1)), (nn.Softmax(0), nn.Softmax(-1))],
)
def test_modules_with_other_functions_are_tried_apart(first: Any, second: Any) -> None:
    plan = divided(nn.Sequential(Acting(first), Acting(second), Acting(first)))
    assert [group.owner for group in plan.groups] == ["0", "2"]


def test_what_a_module_computes_in_training_is_compared_too() -> None:
    assert not divided(Acting(torch.relu, centers=True)).groups


class Planned(nn.Module):
    """A model with a plan of its own, with numbers in the names of layers."""

    tp_plan: ClassVar[dict[str, str]] = {"layers.*.fc1": "colwise", "layers.*.fc2": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Acting(torch.relu) for _ in "ab")


def test_a_plan_names_layers_by_numbers_of_lists_only() -> None:
    model = Planned()
    assert [group.owner for group in divided(model).groups] == ["layers.0", "layers.1"]
    model.get_submodule("layers.0.fc1").register_forward_hook(lambda *_: None)
    plan = divided(model)
    assert [group.owner for group in plan.groups] == ["layers.1"]
    assert plan.not_divided == {"Acting": "hooks read or change its values"}


class Alone:
    """The communicator of one rank."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor


def test_divided_layers_return_the_dtype_of_autocast_and_refuse_later_hooks() -> None:
    model = Acting(torch.relu)
    LayerDivision(model, [LayersToDivide("", ("fc1",), ("fc2",))], LayerExchange(Alone()), 1)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(torch.ones(2, 4)).dtype is torch.bfloat16
    model.fc1.register_forward_hook(lambda *_: None)
    with pytest.raises(MisuseError, match=r"a hook was registered inside of a Acting .* or train with --tp 1"):
        model(torch.ones(2, 4))
