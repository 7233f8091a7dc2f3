"""Models whose sequences several ranks compute together: the weights are those of one process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.tensor  # imported once, before ranks are forked
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

from accel_nb.accelerator import Accelerator
from accel_nb.errors import ConfigError, MisuseError
from accel_nb.runtime.world import World
from tests.ranks.launch import run_ranks
from tests.ranks.mesh_models import VOCABULARY, by_hand, flat, gpt, optimizers, tokens
from tests.ranks.mesh_training import (
    CLOSE,
    assert_equal_copies,
    assert_weights,
    batches,
    range_of,
    train,
)
from tests.support.nightly import nightly

SIZES = (8, 8, 8, 7)


def build(world: World, cp: int = 2, tp: int = 1, **options: Any) -> Accelerator:
    config = {"mesh": {"cp": cp, "tp": tp}, "batch": "global", **options.pop("config", {})}
    return Accelerator(world=world, cpu=True, config=config, **options)


def one_case(world: World, kind: str, strategy: str, clip: float | None, accumulate: int, tp: int = 1) -> Tensor:
    model = gpt()
    made = optimizers(model, kind)
    accelerator = build(world, tp=tp, strategy=strategy, gradient_accumulation_steps=accumulate)
    loader = batches(SIZES)
    accelerator.prepare(model, loader, *made)
    lengths: list[int] = []
    attention = model.get_submodule("blocks.0.attention")
    compute = attention.forward
    attention.forward = lambda x: (lengths.append(x.shape[1]), compute(x))[1]
    train(accelerator, model, made, loader, clip)
    del attention.forward
    assert set(lengths) == {3 if accelerator.components.groups.cp.world.rank == 0 else 2}
    assert_equal_copies(accelerator, model)
    whole = accelerator.get_state_dict(model)
    accelerator.close()
    assert model.head.weight is model.embed.weight
    assert all(torch.equal(whole[name], value) for name, value in model.state_dict().items())
    assert type(model.blocks[0]).__call__ is nn.Module.__call__
    return flat(model)


CASES: list[tuple[Any, ...]] = [("adamw", "auto", None, 1), ("two", "ddp", 0.05, 2), ("sgd", "fsdp", 0.05, 1)]


GROUPS = [(2, CASES), nightly(4, [*CASES, ("adamw", "fsdp", 0.05, 1, 2)])]
if os.environ.get("MESH") == "all":
    GROUPS.append((8, [(*case, tp) for case in CASES for tp in (1, 2)]))


@pytest.mark.parametrize(("size", "cases"), GROUPS)
def test_weights_equal_those_of_one_process(size: int, cases: list[Any]) -> None:
    expected = [by_hand(gpt(), kind, sizes=SIZES, clip=clip, accumulate=k) for kind, _, clip, k, *_ in cases]
    assert_weights(one_case, size, cases, expected)


# --- one group of four ranks for everything else ---


def range_of_whole(first: int, last: int) -> list[tuple[Tensor, Tensor]]:
    return [tokens(number) for number in range(first, last)]


def continue_checkpoints(world: World, folder: Path) -> None:
    """Save in the middle of a training in one mesh, and go on in another."""
    expected = by_hand(gpt(), "adamw", sizes=(8, 8, 8, 8))
    layouts: list[dict[str, Any]] = [{"strategy": "fsdp"}, {"tp": 2}, {"cp": 1, "strategy": "ddp"}]
    for number, options in enumerate(layouts):
        saved, loaded = options, layouts[(number + 1) % len(layouts)]
        for used, first in ((saved, 0), (loaded, 2)):
            model = gpt()
            made = optimizers(model, "adamw")
            accelerator = build(world, **used)
            accelerator.prepare(model, *made)
            if first:
                accelerator.load_state(folder / str(number))
            train(accelerator, model, made, range_of(accelerator, first, first + 2))
            if not first:
                accelerator.save_state(folder / str(number))
            accelerator.close()
        assert (flat(model) - expected).abs().max() < CLOSE, (saved, loaded)


class HandWritten(nn.Module):
    """Attention without torch's function, with a table for all positions."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.later = nn.Buffer(torch.ones(40, 40).triu(1).bool())

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = (q @ k.transpose(-2, -1) / 8**0.5).masked_fill(self.later[:length, :length], float("-inf"))
        return self.out(F.dropout(scores.softmax(-1), 0.2, self.training) @ v)


class MixedBlock(nn.Module):
    """A block that takes positions, a mask and a condition for each sample, with dropout in attention."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)
        self.norm, self.mlp, self.condition = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(3, 8)

    def forward(self, x: Tensor, positions: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.norm(x + positions)
        x = x + self.attention(hidden, hidden, hidden, need_weights=False)[0]
        return x + F.dropout(self.mlp(x).tanh(), 0.2, self.training), self.condition(condition)


class Mixed(nn.Module):
    """Blocks of several kinds behind each other, in a model that uses the whole sequence around them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(40, 8))
        self.mixed = nn.ModuleList(MixedBlock() for _ in range(2))
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.1), 2, enable_nested_tensor=False)
        self.decoder = nn.ModuleList([nn.TransformerDecoderLayer(8, 1, 16, 0.1, batch_first=True)])
        self.plain = nn.Sequential(nn.Sequential(nn.LayerNorm(8), HandWritten(), nn.Linear(8, 8)))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        positions = self.table[torch.arange(x.shape[1])]
        for block in self.mixed:
            x, shift = block(x, positions, condition)
            x = x + shift[:, None]
        x = self.encoder(x.transpose(0, 1)).transpose(0, 1)
        for block in self.decoder:
            x = block(x, torch.cat([x.mean(1, keepdim=True), x[:, :2]], 1))
        return self.plain(x).cumsum(1) + torch.rand(x.shape[1], 1)


def train_blocks(world: World) -> None:
    """Train and evaluate blocks of all kinds with changing lengths and dropout, which is that of one process."""

    def step(model: nn.Module, optimizer: Any, number: int, shape: tuple[int, ...], backward: Any) -> list[Any]:
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(*shape, 8, generator=generator, dtype=torch.float64).requires_grad_()
        condition = torch.randn(shape[0], 3, generator=generator, dtype=torch.float64).requires_grad_()
        torch.manual_seed(number)
        output = model.train()(x, condition)
        backward(output.square().mean() + output[:, 1:].sub(output[:, :-1]).abs().mean())
        nn.utils.clip_grad_value_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            return [x.grad, condition.grad, model.eval()(x, condition), torch.get_rng_state().double()]

    def made_model() -> tuple[nn.Module, Any]:
        torch.manual_seed(4)
        model = Mixed().double()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    (alone, optimizer), (model, made) = made_model(), made_model()
    accelerator = build(world, cp=4)
    accelerator.prepare(model, made)
    for number, shape in enumerate([(3, 37), (2, 9), (8, 8), (1, 16), (2, 5), (9, 32)]):
        expected = step(alone, optimizer, number, shape, torch.autograd.backward)
        got = step(model, made, number, shape, accelerator.backward)
        for wanted, found in zip(expected, got, strict=True):
            assert (wanted - found).abs().max() < CLOSE, shape
    notes = str(accelerator.describe()["notes"])
    assert "1 of Sequential computed whole on each worker" in notes
    accelerator.close()
    assert (flat(model) - flat(alone)).abs().max() < CLOSE


def train_transformers(world: World) -> None:
    """Train a small Qwen3 with padding and with its own loss, and generate text."""

    def made_model() -> Any:
        torch.manual_seed(2)
        config = Qwen3Config(
            vocab_size=VOCABULARY, hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=4, tie_word_embeddings=True, pad_token_id=0, use_sliding_window=True,
            sliding_window=3, max_window_layers=1,
        )  # fmt: skip
        return Qwen3ForCausalLM(config).double()

    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        mask = torch.ones_like(x)
        mask[:3, 3:] = 0
        outer = F.cross_entropy(model(input_ids=x, attention_mask=mask).logits.flatten(0, 1), y.flatten())
        return outer + model(input_ids=x, labels=y).loss

    alone, model = made_model(), made_model()
    [optimizer], made = optimizers(alone, "sgd"), optimizers(model, "sgd")
    for number in range(3):
        loss(alone, *tokens(number)).backward()
        optimizer.step()
        optimizer.zero_grad()
    accelerator = build(world, tp=2)
    accelerator.prepare(model, *made)
    train(accelerator, model, made, range_of_whole(0, 3), loss=loss)
    notes = accelerator.describe()["notes"]
    assert "mesh cp 2 x tp 2 (rank 3 is dp 0, cp 1, tp 1), 14 of 15 linear layers divided" in str(notes)
    assert "whole" not in str(notes)
    x = tokens(0)[0][:2]
    assert torch.equal(model.generate(x, max_new_tokens=4), alone.generate(x, max_new_tokens=4))
    accelerator.close()
    assert (flat(model) - flat(alone)).abs().max() < CLOSE


def train_otherwise(world: World) -> None:
    """Train with activations recomputed, which changes nothing, and in bf16, which changes little."""
    expected = by_hand(gpt(), "adamw", sizes=(8, 8))
    cases: list[tuple[dict[str, Any], float]] = [
        ({"config": {"activation_checkpointing": True}}, CLOSE),
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


class Noisy(nn.Module):
    """A block that draws random numbers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + torch.rand_like(x)


def refuse(world: World) -> None:
    """Refuse, on every rank and before a weight is changed, what cannot be divided."""
    accelerator = build(world)
    linear = nn.Linear(2, 2)
    with pytest.raises(MisuseError, match=r"mesh\.cp 2 needs blocks of layers .* and Linear has none: train with"):
        accelerator.prepare(linear, torch.optim.SGD(linear.parameters(), lr=0.1))
    x = torch.zeros(4, 8, 8)
    problems: list[tuple[nn.Module, Tensor, str]] = [
        (nn.Sequential(Noisy(), Noisy()), x, "Noisy: it draws random numbers by other functions than dropout"),
        (nn.Sequential(nn.TransformerEncoderLayer(8, 2)), x[:, 0], "not a sequence of vectors"),
        (gpt().float(), torch.zeros(2, 3, dtype=torch.int64), "Block: its sequences are too short"),
    ]
    for model, given, problem in problems:
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(
            MisuseError, match=rf"mesh\.cp 2 can divide no block of {type(model).__name__} \(.*{problem}"
        ):
            model(given)
        accelerator.free_memory()
        assert all(type(value) is nn.Parameter for value in model.parameters())
    accelerator.close()
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"cp": 3}, "mesh.cp is 3, which does not divide the 4 workers; use one of 1, 2, 4"),
        ({"strategy": "single"}, "strategy single does not divide sequences; use auto, ddp, fsdp"),
        ({"mixed_precision": "fp16"}, "divided sequences support precision no, bf16 and auto"),
        ({"config": {"mesh": {"cp": 2, "pp": 2}}}, "sequence and pipeline parallelism cannot be combined"),
    ]
    for options, problem in wrong:
        with pytest.raises(ConfigError, match=problem):
            build(world, **options)


def everything_else(world: World, folder: Path) -> None:
    refuse(world)
    train_blocks(world)
    train_transformers(world)
    train_otherwise(world)
    continue_checkpoints(world, folder)


@pytest.mark.nightly
def test_blocks_checkpoints_transformers_and_refusals(tmp_path: Path) -> None:
    run_ranks(everything_else, 4, tmp_path, timeout_s=200)


def hooks_are_called_with_whole_sequences(world: World) -> list[Any]:
    """Return the shapes that a hook on a block gets, and the error of a hook inside of one."""
    accelerator = build(world, config={"mesh": {"cp": 2}})
    model, shapes = gpt(), list[Any]()
    model.get_submodule("blocks.0").register_forward_hook(
        lambda module, args, output: shapes.append(tuple(output.shape))
    )
    accelerator.prepare(model, *optimizers(model, "sgd"))
    model(tokens(0)[0])
    model.get_submodule("blocks.0.mlp").register_forward_hook(
        lambda module, args, output: shapes.append(tuple(output.shape))
    )
    with pytest.raises(MisuseError, match=r"a hook was registered inside of a Block .* or train with --cp 1"):
        model(tokens(0)[0])
    accelerator.close()
    return shapes


def test_hooks_are_called_with_whole_sequences() -> None:
    assert run_ranks(hooks_are_called_with_whole_sequences, 2) == [[(8, 5, 8)], [(8, 5, 8)]]
