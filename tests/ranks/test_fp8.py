"""Training with linear layers in emulated float8, on one rank and on several, whole and divided."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.nn import functional

from accel_nb.accelerator import Accelerator
from accel_nb.accelerator.options.plugins import AORecipeKwargs
from accel_nb.config.sections import FsdpOptions
from accel_nb.errors import ConfigError
from accel_nb.precision.fp8 import find_layers
from accel_nb.precision.half import FullPrecision
from accel_nb.runtime.process.requirements import unmet_extra
from accel_nb.runtime.world import World
from accel_nb.strategies.base import Bundle
from accel_nb.strategies.fsdp.strategy import Fsdp
from tests.ranks.launch import run_ranks

needs_torchao = pytest.mark.skipif(unmet_extra("fp8", "torchao") is not None, reason="torchao is an extra")
RECIPES = ["tensorwise", "rowwise", "rowwise_with_gw_hp"]


class Block(nn.Module):
    """Two layers that are wide enough, and a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 48), nn.Linear(48, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(x)))


class Net(nn.Module):
    """Blocks between a first and a last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def net() -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(2)
    model = Net()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def data(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(20, 8, generator=generator)
    return x, x[:, :4].sin()


def losses(accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> list[float]:
    found = []
    for number in range(count):
        x, y = data(number)
        loss = functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def build(world: World, strategy: str, precision: str = "fp8", **fp8: Any) -> Accelerator:
    options = {"fp8": {"emulate": True, **fp8}} if precision == "fp8" else {}
    return Accelerator(world=world, cpu=True, strategy=strategy, mixed_precision=precision, config=options)


def trains(world: World, strategy: str, precision: str = "fp8", **fp8: Any) -> dict[str, Any]:
    model, optimizer = net()
    weight = model.blocks[0].up.weight
    accelerator = build(world, strategy, precision, **fp8)
    accelerator.prepare(model, optimizer)
    with torch.no_grad():
        outputs = model(data(0)[0])
    found: dict[str, Any] = {"outputs": outputs, "losses": losses(accelerator, model, optimizer, 25)}
    found["notes"] = accelerator.describe()["notes"]
    accelerator.close()
    found["plain"] = all(type(part) in (Net, Block, nn.Linear, nn.ModuleList) for part in model.modules())
    found["same"] = model.blocks[0].up.weight is weight and weight.dtype == torch.float32
    return found


@needs_torchao
@pytest.mark.parametrize("recipe", RECIPES)
def test_emulated_float8_rounds_more_than_bf16_and_trains_as_well(recipe: str) -> None:
    torch.manual_seed(2)
    exact = net()[0](data(0)[0]).detach()
    half, eighth = trains(World(), "single", "bf16"), trains(World(), "single", recipe=recipe)
    error = {name: float((found["outputs"] - exact).norm()) for name, found in (("bf16", half), ("fp8", eighth))}
    assert 1.5 * error["bf16"] < error["fp8"] < 0.1 * float(exact.norm())
    assert eighth["losses"][-1] < 0.5 * eighth["losses"][0]
    assert eighth["losses"][-1] == pytest.approx(half["losses"][-1], rel=0.1)
    assert eighth["plain"]
    assert eighth["same"]
    assert f"fp8 ({recipe}, emulated: slow) in 4 of 6 linear layers of Net, the rest in bf16" in eighth["notes"]


@needs_torchao
def test_ranks_train_alike_whole_and_divided() -> None:
    alone = trains(World(), "single")
    for strategy in ("ddp", "fsdp"):
        for found in run_ranks(trains, 2, strategy):
            assert found["losses"] == pytest.approx(alone["losses"], rel=0.05)
            assert found["plain"]
            assert found["same"]


class CountingGather(DefaultAllGather):
    """Gathers, and counts the bytes that this rank sends."""

    num_bytes = 0

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.num_bytes += input_tensor.nbytes
        return super().__call__(output_tensor, input_tensor, *args, **kwargs)


def gathers(world: World, float8_gather: bool) -> dict[str, Any]:
    """Train a divided model; say what is sent for a block, what its layers multiply by, and what is left of it."""
    model, optimizer = net()
    accelerator = Accelerator(
        world=world, cpu=True, strategy="fsdp", mixed_precision="fp8",
        config={"fp8": {"emulate": True}, "fsdp": {"float8_gather": float8_gather}},
    )  # fmt: skip
    accelerator.prepare(model, optimizer)
    block: Any = model.blocks[0]
    block.set_custom_all_gather(counted := CountingGather())
    seen: list[Any] = []
    hook = block.up.register_forward_hook(lambda layer, *_: seen.append(layer.weight.detach()))
    with torch.no_grad():
        found: dict[str, Any] = {"outputs": model(data(0)[0]), "bytes": counted.num_bytes}
    hook.remove()
    found["multiplied"] = type(seen[0]).__name__, getattr(seen[0], "_data", seen[0]).dtype
    found["losses"] = losses(accelerator, model, optimizer, 25)
    found["kept"] = {(type(value.data.to_local()), value.dtype) for value in model.parameters()}
    found["notes"] = accelerator.describe()["notes"]
    with torch.no_grad():  # a unit called by itself, with weights that were written by hand: the scale is a new one
        for value in model.parameters():
            value.mul_(100)
        found["by hand"] = block(x := torch.ones(2, 32)).abs().max().item()
        found["empty"] = tuple(block(x[:0]).shape)
    accelerator.close()
    with torch.no_grad():
        found["alone"] = block(x).abs().max().item()
    found["plain"] = all(type(part) in (Net, Block, nn.Linear, nn.ModuleList) for part in model.modules())
    return found


@pytest.mark.nightly
@needs_torchao
def test_weights_are_gathered_in_float8() -> None:
    """On three ranks, which share 32 rows unevenly, as parts that are padded to 11 rows; 48 are 16 for each."""
    for half, eighth in zip(run_ranks(gathers, 3, False), run_ranks(gathers, 3, True), strict=True):
        weights, biases = 16 * 32 + 11 * 48, 16 + 11
        assert half["bytes"] == 2 * weights + 2 * biases
        assert eighth["bytes"] == weights + 2 * biases
        assert half["multiplied"] == ("Tensor", torch.bfloat16)
        assert eighth["multiplied"] == ("Float8TrainingTensor", torch.float8_e4m3fn)
        assert eighth["losses"] == pytest.approx(half["losses"], rel=0.05)
        assert eighth["losses"][-1] < 0.5 * eighth["losses"][0]
        assert eighth["kept"] == half["kept"] == {(Tensor, torch.float32)}
        assert eighth["by hand"] == pytest.approx(eighth["alone"], rel=0.1)
        assert eighth["empty"] == (0, 32)
        assert eighth["plain"]
        assert "float8_gather of 4 weights" in eighth["notes"]


def test_layers_are_left_out_by_name_and_by_size() -> None:
    model, _ = net()
    blocks: Any = model.blocks
    assert find_layers(model, None) == [layer for block in blocks for layer in (block.up, block.down)]
    assert find_layers(model, ("blocks.0",)) == [blocks[1].up, blocks[1].down]
    assert find_layers(model, ("up",)) == [blocks[0].down, blocks[1].down]
    assert find_layers(nn.Sequential(nn.Linear(32, 32)), ()) != []
    assert find_layers(nn.Sequential(nn.Linear(32, 24)), ()) == []
    assert find_layers(nn.MultiheadAttention(32, 2), ()) == []  # it reads the weights of a layer that it never calls


@needs_torchao
def test_copies_are_plain_and_a_trial_finds_which_is_faster() -> None:
    model, optimizer = net()
    accelerator = build(World(), "single", trial_rows=16, skip_modules=["head"])
    accelerator.prepare(model, optimizer)
    (line,) = [note for note in accelerator.describe()["notes"] if note.startswith("benchmark of 4 layers on 16 rows")]
    assert "times as" in line
    assert model(torch.empty(0, 8)).shape == (0, 4)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(twin.blocks[0].up) is nn.Linear
    accelerator.close()
    accelerator = build(World(), "single")
    accelerator.prepare(narrow := nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    assert any("fp8 has no effect on Sequential" in note for note in accelerator.describe()["notes"])
    accelerator.free_memory(narrow)
    accelerator.close()


def test_fp8_is_refused_where_it_cannot_be_had() -> None:
    with pytest.raises(ConfigError, match=r"the cpu has no float8 arithmetic; use bf16, or fp8\.emulate"):
        Accelerator(cpu=True, mixed_precision="fp8")


@needs_torchao
def test_records_of_torchao_are_read_or_refused() -> None:
    from torchao.float8 import Float8LinearConfig

    config = replace(Float8LinearConfig.from_recipe_name("rowwise"), emulate=True, pad_inner_dim=True)
    accelerator = Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs(config)])
    assert accelerator.resolved.config.fp8.recipe == "rowwise"
    assert accelerator.resolved.config.fp8.emulate
    accelerator.close()
    other = replace(config, round_scales_to_power_of_2=False)
    record = AORecipeKwargs(other, lambda module, name: True, pad_inner_dim=False)
    with pytest.raises(ConfigError) as caught:
        record.as_options()
    assert len(caught.value.problems) == 3
    whole = replace(Float8LinearConfig.from_recipe_name("tensorwise"), enable_fsdp_float8_all_gather=True)
    assert AORecipeKwargs(whole).as_options() == {
        "fp8.recipe": "tensorwise", "fp8.emulate": False, "fsdp.float8_gather": True,
    }  # fmt: skip


def test_gathering_in_float8_is_refused_where_it_cannot_be() -> None:
    fsdp = {"float8_gather": True, "cpu_offload": True}
    with pytest.raises(ConfigError) as caught:
        Accelerator(cpu=True, mixed_precision="fp8", config={"fp8": {"recipe": "rowwise"}, "fsdp": fsdp})
    assert len(caught.value.problems) == 2
    assert "rowwise scales weights by rows and by columns" in str(caught.value)
    planned = Fsdp(FsdpOptions(**fsdp), FullPrecision())  # as a plan would have it, which asks before it chooses
    assert "not in float8" in str(planned.refusal(Bundle()))
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", config={"fsdp": {"float8_gather": True}})
    assert any("float8_gather" in note and "precision is bf16" in note for note in accelerator.resolved.notes)
    accelerator.close()
