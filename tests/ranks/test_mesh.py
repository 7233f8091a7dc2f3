"""Layers that several ranks compute together: the weights are those of one process."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.tensor  # imported once, before ranks are forked
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial
from torch.nn import functional as F
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

from accel_nb.accelerator import Accelerator
from accel_nb.errors import ConfigError, MisuseError
from accel_nb.runtime.distributed import sharded
from accel_nb.runtime.world import World
from accel_nb.telemetry.validation_meter import ValidationLoop, ValidationMeter
from tests.ranks.launch import run_ranks
from tests.ranks.mesh_models import VOCABULARY, by_hand, flat, gpt, optimizers, tokens
from tests.ranks.mesh_training import (
    CLOSE,
    assert_equal_copies,
    assert_weights,
    batches,
    range_of,
    train,
    train_with_dropout,
)
from tests.support.nightly import nightly

SIZES = (8, 8, 8, 7)


def build(world: World, tp: int = 2, **options: Any) -> Accelerator:
    config = {"mesh": {"tp": tp}, "batch": "global", **options.pop("config", {})}
    return Accelerator(world=world, cpu=True, config=config, **options)


def one_case(
    world: World,
    kind: str,
    strategy: str,
    clip: float | None,
    accumulate: int,
    config: dict[str, Any] | None = None,
) -> Tensor:
    model = gpt()
    if not world.is_main:
        with torch.no_grad():
            model.embed.weight.zero_()  # rank 0's weights become everyone's
    made = optimizers(model, kind)
    accelerator = build(world, strategy=strategy, gradient_accumulation_steps=accumulate, config=config or {})
    loader = batches(SIZES)
    accelerator.prepare(model, loader, *made)
    assert (
        sharded.num_copies(model.get_parameter("blocks.0.attention.q.weight"), world.size)
        == accelerator.components.groups.mesh.dp_replicate
    )
    train(accelerator, model, made, loader, clip)
    assert_equal_copies(accelerator, model)
    whole = accelerator.get_state_dict(model)
    accelerator.close()
    assert model.head.weight is model.embed.weight
    assert all(torch.equal(whole[name], value) for name, value in model.state_dict().items())
    assert type(model.get_submodule("blocks.0.attention.q")) is nn.Linear
    return flat(model)


CASES: list[tuple[Any, ...]] = [("adamw", "auto", None, 1), ("sgd", "fsdp", 0.05, 1), ("two", "ddp", 0.05, 2)]


GROUPS = [(2, CASES[:1]), nightly(4, CASES)]
if os.environ.get("MESH") == "all":
    GROUPS.append((8, [("adamw", "fsdp", 0.05, 2, {"fsdp": {"hybrid_shard_size": 2}}), *CASES]))


@pytest.mark.parametrize(("size", "cases"), GROUPS)
def test_weights_equal_those_of_one_process(size: int, cases: list[Any]) -> None:
    expected = [by_hand(gpt(), kind, sizes=SIZES, clip=clip, accumulate=k) for kind, _, clip, k, *_ in cases]
    assert_weights(one_case, size, cases, expected)


# --- one group of four ranks for everything else ---

LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"tp": 1, "strategy": "ddp"},
    "fsdp": {"tp": 1, "strategy": "fsdp"},
    "tp": {"tp": 2, "strategy": "ddp"},
    "tp x fsdp": {"tp": 2, "strategy": "fsdp"},
}


PAIRS = [("ddp", "tp x fsdp"), ("fsdp", "tp"), ("tp", "fsdp"), ("tp x fsdp", "ddp"), ("tp x fsdp", "tp")]
if os.environ.get("MESH") == "all":
    PAIRS = list(itertools.product(LAYOUTS, LAYOUTS))


def continue_checkpoints(world: World, folder: Path) -> None:
    """Save in the middle of a training in each layout, and go on in others."""
    expected = by_hand(gpt(), "adamw", sizes=(8, 8, 8, 8))
    for saved, options in LAYOUTS.items():
        model, made, accelerator = prepared(world, **options)
        train(accelerator, model, made, range_of(accelerator, 0, 2))
        accelerator.save_state(folder / saved)
        accelerator.close()
    for saved, loaded in PAIRS:
        model, made, accelerator = prepared(world, **LAYOUTS[loaded])
        accelerator.load_state(folder / saved)
        train(accelerator, model, made, range_of(accelerator, 2, 4))
        accelerator.close()
        assert (flat(model) - expected).abs().max() < CLOSE, (saved, loaded)


def prepared(world: World, **options: Any) -> tuple[Any, list[Any], Accelerator]:
    model = gpt()
    made = optimizers(model, "adamw")
    accelerator = build(world, **options)
    accelerator.prepare(model, *made)
    return model, made, accelerator


def draw_dropout(world: World) -> None:
    """Train with dropout: every copy stays equal to the bit, and the data shares draw different masks."""
    states = train_with_dropout(build(world, seed=3))
    assert states[0] == states[1] != states[2] == states[3]


def train_transformers(world: World) -> None:
    """Train a small Qwen3, by its own plan, with norms of heads whose weights are not divided."""

    def made_model() -> Any:
        torch.manual_seed(2)
        config = Qwen3Config(
            vocab_size=VOCABULARY, hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=4, tie_word_embeddings=True,
        )  # fmt: skip
        return Qwen3ForCausalLM(config).double()

    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(input_ids=x).logits.flatten(0, 1), y.flatten())

    alone, model = made_model(), made_model()
    [optimizer], made = optimizers(alone, "sgd"), optimizers(model, "sgd")
    for number in range(3):
        loss(alone, *tokens(number)).backward()
        optimizer.step()
        optimizer.zero_grad()
    accelerator = build(world, strategy="fsdp")
    accelerator.prepare(model, *made)
    assert "14 of 15 linear layers divided" in str(accelerator.describe()["notes"])
    train(accelerator, model, made, range_of(accelerator, 0, 3), loss=loss)
    accelerator.close()
    assert (flat(model) - flat(alone)).abs().max() < CLOSE


class TwoLayers(nn.Module):
    """Layers that are used apart as well, which a division cannot serve."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def refuse(world: World) -> None:
    """Refuse, on every rank and before anything is changed, what cannot be exact."""
    model = gpt(num_heads=1)
    accelerator = build(world)
    with pytest.raises(MisuseError, match=r"blocks\.0\.attention\.num_heads of a Attention is 1, which mesh\.tp 2"):
        accelerator.prepare(model, *optimizers(model, "sgd"))
    assert not any(map(sharded.is_sharded, model.parameters()))
    mixing = nn.Sequential(nn.Linear(4, 8), nn.Softmax(-1), nn.Linear(8, 4))
    with pytest.raises(MisuseError, match=r"finds no layers to divide in Sequential \(Sequential: its parts compute"):
        accelerator.prepare(mixing, torch.optim.SGD(mixing.parameters(), lr=0.1))
    compiled = torch.compile(TwoLayers(), backend="eager")
    with pytest.raises(MisuseError, match=r"cannot be combined with torch\.compile of a TwoLayers"):
        accelerator.prepare(compiled, torch.optim.SGD(compiled.parameters(), lr=0.1))
    layers = TwoLayers()
    accelerator.prepare(layers, torch.optim.SGD(layers.parameters(), lr=0.1))
    with pytest.raises(MisuseError, match="would return a part of its output"):
        layers.up(torch.zeros(2, 4))
    with pytest.raises(MisuseError, match="each rank holds shards"), accelerator.join_uneven_inputs([layers]):
        pass
    accelerator.free_memory()
    layers.up.register_forward_hook(lambda *_: None)  # the plan is not that of before
    with pytest.raises(MisuseError, match=r"finds no layers to divide in TwoLayers \(TwoLayers: hooks read or change"):
        accelerator.prepare(layers, torch.optim.SGD(layers.parameters(), lr=0.1))
    accelerator.close()
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"tp": 3}, "mesh.tp is 3, which does not divide the 4 workers; use one of 1, 2, 4"),
        ({"strategy": "single"}, "strategy single does not divide layers; use auto, ddp, fsdp"),
        ({"mixed_precision": "fp16"}, "divided layers support precision no, bf16 and auto"),
    ]
    for options, problem in wrong:
        with pytest.raises(ConfigError, match=problem):
            build(world, **options)


def everything_else(world: World, folder: Path) -> None:
    refuse(world)
    draw_dropout(world)
    train_transformers(world)
    continue_checkpoints(world, folder)


def test_checkpoints_dropout_transformers_and_refusals(tmp_path: Path) -> None:
    run_ranks(everything_else, 4, tmp_path, timeout_s=200)


class Recorded:
    """A sink that records events."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def emit(self, event: Any) -> None:
        self.events.append(event)


def validates_with_sharded_losses(world: World) -> int:
    """Measure, on rank 0, the validation losses of a loop whose loss is a sum over ranks; return how many are known."""
    mesh = init_device_mesh("cpu", (world.size,))
    sink, batches = Recorded(), (number for number in range(3))
    loop = ValidationLoop(ValidationMeter(world.rank, sink))
    for _ in range(3):
        if world.is_main:
            loop.record(batches, 4, 0, {"loss"})
        loss = DTensor.from_local(torch.ones(()), mesh, [Partial()])
    assert loss.to_local() == 1
    if world.is_main:
        loop.record(None, None, 0, {"loss"})
        loop.finish(1, {"loss"})
    return len(sink.events)


def test_the_loss_of_a_validation_is_not_read_if_that_is_a_collective() -> None:
    assert run_ranks(validates_with_sharded_losses, 2, timeout_s=60) == [0, 0]
