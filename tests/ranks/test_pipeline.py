"""Models whose blocks are computed in stages: the weights are those of one process."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.tensor  # imported once, before ranks are forked
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

from accel_nb.accelerator import Accelerator
from accel_nb.accelerator.plain_cells.autoprepare import PlainCells
from accel_nb.errors import ConfigError, MisuseError
from accel_nb.runtime.distributed.sharded import is_absent, local_shard
from accel_nb.runtime.world import World
from tests.ranks.launch import run_ranks
from tests.ranks.mesh_models import VOCABULARY, by_hand, flat, gpt, loss_of, optimizers, tokens
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


def build(world: World, pp: int = 2, tp: int = 1, **options: Any) -> Accelerator:
    config = {"mesh": {"pp": pp, "tp": tp, "micro_batches": 3}, "batch": "global", **options.pop("config", {})}
    return Accelerator(world=world, cpu=True, config=config, **options)


def one_case(world: World, kind: str, strategy: str, clip: float | None, accumulate: int, tp: int = 1) -> Tensor:
    model = gpt()
    made = optimizers(model, kind)
    accelerator = build(world, tp=tp, strategy=strategy, gradient_accumulation_steps=accumulate)
    loader = batches(SIZES)
    accelerator.prepare(model, loader, *made)
    held = [sum(local_shard(value).numel() for value in block.parameters()) for block in model.blocks]
    assert sorted(map(bool, held)) == [False, True]
    train(accelerator, model, made, loader, clip)
    assert_equal_copies(accelerator, model)
    stepped = {id(value) for optimizer in made for value in optimizer.state}
    assert not any(id(value) in stepped for value in model.parameters() if is_absent(value))
    whole = accelerator.get_state_dict(model)
    accelerator.close()
    assert model.head.weight is model.embed.weight
    assert all(torch.equal(whole[name], value) for name, value in model.state_dict().items())
    assert type(model.blocks[0]).__call__ is nn.Module.__call__
    return flat(model)


CASES: list[tuple[Any, ...]] = [("adamw", "auto", None, 1), ("two", "ddp", 0.05, 2), ("sgd", "fsdp", 0.05, 1)]


GROUPS = [(2, CASES), nightly(4, [*CASES, ("adamw", "ddp", 0.05, 1, 2)])]
if os.environ.get("MESH") == "all":
    GROUPS.append((8, [(*case, tp) for case in CASES for tp in (1, 2)]))


@pytest.mark.parametrize(("size", "cases"), GROUPS)
def test_weights_equal_those_of_one_process(size: int, cases: list[Any]) -> None:
    expected = [by_hand(gpt(), kind, sizes=SIZES, clip=clip, accumulate=k) for kind, _, clip, k, *_ in cases]
    assert_weights(one_case, size, cases, expected)


# --- one group of four ranks for everything else ---

LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"pp": 1, "strategy": "ddp"},
    "pp": {"pp": 2, "strategy": "ddp"},
    "pp x fsdp": {"pp": 2, "strategy": "fsdp"},
    "pp x tp": {"pp": 2, "tp": 2, "strategy": "fsdp"},
    "tp x fsdp": {"pp": 1, "tp": 2, "strategy": "fsdp"},
}
PAIRS = [("ddp", "pp"), ("pp", "ddp"), ("pp", "tp x fsdp"), ("pp x fsdp", "pp"), ("pp x tp", "pp x fsdp")]
if os.environ.get("MESH") == "all":
    PAIRS = list(itertools.product(LAYOUTS, LAYOUTS))


def prepared(world: World, **options: Any) -> tuple[Any, list[Any], Accelerator]:
    model = gpt()
    made = optimizers(model, "adamw")
    accelerator = build(world, **options)
    accelerator.prepare(model, *made)
    return model, made, accelerator


def continue_checkpoints(world: World, folder: Path) -> None:
    """Save in the middle of a training in each layout, and go on in others."""
    expected = by_hand(gpt(), "adamw", sizes=(8, 8, 8, 8))
    for saved in dict.fromkeys(first for first, _ in PAIRS):
        model, made, accelerator = prepared(world, **LAYOUTS[saved])
        train(accelerator, model, made, range_of(accelerator, 0, 2))
        accelerator.save_state(folder / saved)
        accelerator.close()
    for saved, loaded in PAIRS:
        model, made, accelerator = prepared(world, **LAYOUTS[loaded])
        accelerator.load_state(folder / saved)
        train(accelerator, model, made, range_of(accelerator, 2, 4))
        accelerator.close()
        assert (flat(model) - expected).abs().max() < CLOSE, (saved, loaded)


def draw_dropout(world: World) -> None:
    """Train with dropout: copies stay equal to the bit, and the code around the model draws the same numbers."""
    states = train_with_dropout(build(world, seed=3))
    assert states[0] == states[2] != states[1] == states[3]


def train_lengths(world: World) -> None:
    """Train and evaluate with changing lengths and sizes, and with inputs that need a gradient."""

    def step(model: nn.Module, optimizer: Any, x: Tensor, backward: Any) -> list[Any]:
        x = x.clone().requires_grad_()
        loss = (model(x) * torch.linspace(0, 1, 4, dtype=x.dtype)).square().mean()
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            return [loss.detach(), x.grad, model(x[:1])]

    def made_model() -> tuple[nn.Module, Any]:
        torch.manual_seed(4)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4), nn.LayerNorm(4)).double()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    (alone, optimizer), (model, made) = made_model(), made_model()
    accelerator = build(world, pp=4)
    accelerator.prepare(model, made)
    for number, shape in enumerate([(5, 3, 4), (2, 7, 4), (1, 3, 4), (5, 2, 4)]):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
        expected = step(alone, optimizer, x, torch.autograd.backward)
        for wanted, found in zip(expected, step(model, made, x, accelerator.backward), strict=True):
            assert (wanted - found).abs().max() < CLOSE, shape
    accelerator.close()
    assert (flat(model) - flat(alone)).abs().max() < CLOSE


def train_transformers(world: World) -> None:
    """Train a small Qwen3, whose blocks take masks and positions beside their input, also with its own loss."""

    def made_model() -> Any:
        torch.manual_seed(2)
        config = Qwen3Config(
            vocab_size=VOCABULARY, hidden_size=8, intermediate_size=16, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, head_dim=4, tie_word_embeddings=True,
        )  # fmt: skip
        return Qwen3ForCausalLM(config).double()

    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        outer = F.cross_entropy(model(input_ids=x, attention_mask=torch.ones_like(x)).logits.flatten(0, 1), y.flatten())
        return outer + model(input_ids=x, labels=y).loss

    alone, model = made_model(), made_model()
    [optimizer], made = optimizers(alone, "sgd"), optimizers(model, "sgd")
    for number in range(3):
        loss(alone, *tokens(number)).backward()
        optimizer.step()
        optimizer.zero_grad()
    accelerator = build(world, tp=2, config={"mesh": {"pp": 2, "tp": 2, "split_points": ["model.layers.1"]}})
    accelerator.prepare(model, *made)
    assert "stages of 1 and 2 blocks" in str(accelerator.describe()["notes"])
    train(accelerator, model, made, range_of(accelerator, 0, 3), loss=loss)
    accelerator.close()
    assert (flat(model) - flat(alone)).abs().max() < CLOSE


def train_otherwise(world: World) -> None:
    """Train with activations recomputed, which changes nothing, and in bf16, which changes little."""
    expected = by_hand(gpt(), "adamw", sizes=(8, 8))
    cases: list[tuple[dict[str, Any], float]] = [
        ({"config": {"mesh": {"pp": 2, "micro_batches": 2}, "activation_checkpointing": True}}, CLOSE),
        ({"mixed_precision": "bf16", "strategy": "fsdp"}, 0.2),
    ]
    for options, close in cases:
        model = gpt()
        made = optimizers(model, "adamw")
        accelerator = build(world, **options)
        accelerator.prepare(model, *made)
        train(accelerator, model, made, range_of(accelerator, 0, 2))
        accelerator.close()
        assert (flat(model) - expected).abs().max() < close, options


def drop_gradients(world: World) -> None:
    """Leave out the step of one batch: its gradients are dropped, and its graph too."""

    def run(model: Any, made: list[Any], backward: Any) -> None:
        for number in range(3):
            backward(loss_of(model, *tokens(number)))
            if number == 1:
                model.zero_grad()
                continue
            made[0].step()
            made[0].zero_grad()

    alone, model = gpt(), gpt()
    run(alone, optimizers(alone, "sgd"), torch.autograd.backward)
    made = optimizers(model, "sgd")
    accelerator = build(world, config={"mesh": {"pp": 2, "micro_batches": 3}})
    accelerator.prepare(model, *made)
    run(model, made, accelerator.backward)
    accelerator.close()
    assert (flat(model) - flat(alone)).abs().max() < CLOSE


class Headless(nn.Module):
    """A model whose embedding, head and scale are called around its forward, as those of the annotated transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
        self.norm, self.scale = nn.LayerNorm(8), nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.blocks(self.embed(x)))


def train_around(world: World) -> None:
    """Train with parts of the model that plain cells call outside of its forward, which each stage computes."""

    def run(way: str) -> nn.Module:
        torch.manual_seed(6)
        model = Headless().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for x, y in DataLoader(TensorDataset(*tokens(0, 24)), batch_size=8):
            hidden = model(x) if way == "call" else model.forward(x)
            loss = F.cross_entropy((model.head(hidden) * model.scale).flatten(0, 1), y.flatten())
            optimizer.zero_grad()
            (loss + model.embed(x).square().mean()).backward()
            optimizer.step()
        return model

    for way in ("call", "forward"):
        accelerator = build(world, pp=world.size)  # with several shares of the data these parts are refused
        with PlainCells(accelerator).run_cell():
            found = run(way)
        accelerator.close()
        assert (flat(found) - flat(run(way))).abs().max() < CLOSE, way


class Skipping(nn.Module):
    """Blocks whose outputs are used later as well, which a stage does not have."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        outputs = [x]
        for block in self.blocks:
            outputs.append(block(outputs[-1] * 2 if self.kind == "between" else outputs[-1]))
        return outputs[-1] + (outputs[2] if self.kind == "later" else 0)


def refuse(world: World) -> None:
    """Refuse, on every rank and before anything is changed, what cannot be exact."""
    accelerator = build(world)
    problems: list[tuple[nn.Module, str]] = [
        (nn.Linear(2, 2), "needs at least 2 blocks of one class .* and Linear has no list of blocks"),
        (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), "has batch normalization"),
    ]
    for model, problem in problems:
        with pytest.raises(MisuseError, match=problem):
            accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert all(type(value) is nn.Parameter for value in model.parameters())
    for kind, problem in (("between", "changes values between its blocks"), ("later", "more than the next block")):
        skipping = Skipping(kind)
        accelerator.prepare(skipping, torch.optim.SGD(skipping.parameters(), lr=0.1))
        with pytest.raises(MisuseError, match=problem):
            skipping(torch.zeros(4, 4))
        accelerator.free_memory()
    chain = Skipping("chain")
    accelerator.prepare(chain, torch.optim.SGD(chain.parameters(), lr=0.1))
    x = torch.ones(4, 4, requires_grad=True)
    with pytest.raises(MisuseError, match=r"call loss\.backward\(\)"):
        torch.autograd.grad(chain(x).sum(), x)
    accelerator.close()
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"pp": 3}, "mesh.pp is 3, which does not divide the 4 workers; use one of 1, 2, 4"),
        ({"strategy": "single"}, "strategy single does not compute in stages; use auto, ddp, fsdp"),
        ({"mixed_precision": "fp16"}, "stages support precision no, bf16 and auto"),
        ({"config": {"mesh": {"pp": 2, "split_points": ["a", "b"]}}}, "2 split points make 3 stages"),
    ]
    for options, problem in wrong:
        with pytest.raises(ConfigError, match=problem):
            build(world, **options)


def everything_else(world: World, folder: Path) -> None:
    refuse(world)
    draw_dropout(world)
    drop_gradients(world)
    train_around(world)
    train_lengths(world)
    train_transformers(world)
    train_otherwise(world)
    continue_checkpoints(world, folder)


@pytest.mark.nightly
def test_checkpoints_dropout_transformers_and_refusals(tmp_path: Path) -> None:
    run_ranks(everything_else, 4, tmp_path, timeout_s=200)


class Normalizing(nn.Module):
    """Batch normalization in the blocks, before and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
        self.unused = nn.Parameter(torch.tensor(1.0))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in "ab")

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Centering(nn.Module):
    """Blocks that compute with all rows of a batch in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Centered() for _ in "ab")

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Centered(nn.Linear):
    """A layer of four features."""

    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, input: Tensor) -> Tensor:
        output = super().forward(input)
        return output - output.mean(0) if self.training else output


def step_with_buffers(world: World, micro_batches: int) -> list[Tensor]:
    """Return outputs, weights and buffers of a model that is still divided, less those of one process."""

    def made_model() -> nn.Module:
        torch.manual_seed(5)
        return (Normalizing() if micro_batches == 1 else Centering()).double()

    alone, model = made_model(), made_model()
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    accelerator = build(world, config={"mesh": {"pp": 2, "micro_batches": micro_batches}})
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    differences: list[Tensor] = []
    for _ in range(2):
        expected, found = alone(x), model(x)
        torch.autograd.backward(expected.square().mean())
        accelerator.backward(found.square().mean())
        differences.append(found.detach() - expected.detach())
    differences += [a.double() - b.double() for a, b in zip(model.buffers(), alone.buffers(), strict=True)]
    accelerator.close()
    for found, expected in zip(_gradients(model), _gradients(alone), strict=True):
        assert (found is None) == (expected is None)
        differences += [] if found is None else [found - expected]
    return differences


def _gradients(model: nn.Module) -> list[Any]:
    return [value.grad for value in model.parameters()]


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_buffers_and_statistics_in_training_are_those_of_one_process(micro_batches: int) -> None:
    for differences in run_ranks(step_with_buffers, 2, micro_batches):
        assert max(float(value.abs().max()) for value in differences) < CLOSE
