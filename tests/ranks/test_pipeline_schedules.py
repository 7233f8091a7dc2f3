"""`Accelerator.pipeline`: schedules train a model in stages to the weights and losses of one process."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.pipelining  # imported once, before ranks are forked
import torch.distributed.tensor
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

from accel_nb.accelerator import Accelerator
from accel_nb.errors import ConfigError, MisuseError
from accel_nb.runtime.distributed.pipeline_stages import why_no_stages
from accel_nb.runtime.distributed.sharded import local_shard
from accel_nb.runtime.world import World
from tests.ranks.launch import run_ranks
from tests.ranks.mesh_models import LENGTH, VOCABULARY, Gpt, by_hand, flat, gpt, loss_of, optimizers, tokens
from tests.ranks.mesh_training import assert_equal_copies, batches, range_of, train

NO_STAGES = why_no_stages(num_stages=2, num_chunks=4, backend="gloo")
pytestmark = pytest.mark.skipif(NO_STAGES is not None, reason=str(NO_STAGES))

SIZES = (8, 8, 8, 3)
CLOSE = 1e-9
IGNORED = -100


def build(world: World, per_rank: int = 1, pp: int = 2, **options: Any) -> Accelerator:
    mesh = {"pp": pp, "stages_per_rank": per_rank, "micro_batches": 4}
    return Accelerator(world=world, cpu=True, config={"mesh": mesh, "batch": "global"}, **options)


def token_loss(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), y.flatten(), ignore_index=IGNORED)


def token_sum(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), y.flatten(), ignore_index=IGNORED, reduction="sum")


def one_case(
    world: World, schedule: Any, per_rank: int, kind: str, strategy: str, clip: float | None, accumulate: int
) -> tuple[Tensor, list[float]]:
    model = gpt(num_blocks=2 * per_rank)
    made = optimizers(model, kind)
    accelerator = build(world, per_rank, strategy=strategy, gradient_accumulation_steps=accumulate)
    loader = batches(SIZES)
    accelerator.prepare(model, loader, *made)
    held = [sum(local_shard(value).numel() for value in block.parameters()) for block in model.blocks]
    assert sum(map(bool, held)) == per_rank
    pipeline = accelerator.pipeline(model, token_loss, schedule=schedule)
    losses: list[float] = []
    for x, y in loader:
        with accelerator.accumulate(model):
            losses.append(accelerator.reduce(pipeline.step(x, target=y).double(), "mean").item())
            if clip is not None and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            for optimizer in made:
                optimizer.step()
                optimizer.zero_grad()
    assert_equal_copies(accelerator, model)
    accelerator.close()
    return flat(model), losses


CASES: list[tuple[Any, ...]] = [
    ("gpipe", 1, "sgd", "auto", None, 1),
    ("gpipe", 2, "adamw", "ddp", None, 1),
    ("1f1b", 1, "adamw", "auto", 0.05, 1),
    ("1f1b", 2, "two", "fsdp", None, 2),
    ("zero_bubble", 1, "two", "fsdp", 0.05, 2),
    ("zero_bubble", 2, "adamw", "ddp", None, 1),
]


def train_cases(world: World, cases: list[Any]) -> list[tuple[Tensor, list[float]]]:
    return [one_case(world, *case) for case in cases]


@pytest.mark.parametrize("size", [2, 4, 8] if os.environ.get("MESH") == "all" else [2])
def test_weights_and_losses_equal_those_of_one_process(size: int) -> None:
    expected = [
        by_hand(gpt(num_blocks=2 * per_rank), kind, sizes=SIZES, clip=clip, accumulate=k)
        for _, per_rank, kind, _, clip, k in CASES
    ]
    for rank, found in enumerate(run_ranks(train_cases, size, CASES, timeout_s=150)):
        for case, (weights, losses), wanted in zip(CASES, found, expected, strict=True):
            assert (weights - wanted).abs().max() < CLOSE, (size, case, rank)
            first = loss_of(gpt(num_blocks=2 * case[1]), *tokens(0, SIZES[0])).item()
            assert losses[0] == pytest.approx(first, rel=1e-9), (size, case, rank)


class Turned(nn.Module):
    """A block whose output, and whose gradient of the input, are not contiguous."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.mlp = block

    def forward(self, x: Tensor) -> Tensor:
        return turn(self.mlp(turn(x)))


class Viewed(Turned):
    """A block whose output is a view, which zero bubble could not detach in place between two stages of one rank."""

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x).flatten().view_as(x)


def turn(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def wrapped(kind: type[Turned], num_blocks: int) -> Gpt:
    model = gpt(num_blocks=num_blocks)
    model.blocks = nn.ModuleList(map(kind, model.blocks))
    return model


FORMS: list[tuple[Any, int, torch.dtype, type[Turned]]] = [
    ("gpipe", 1, torch.float64, Turned),
    ("1f1b", 2, torch.float32, Turned),
    ("zero_bubble", 1, torch.float64, Turned),
    ("zero_bubble", 2, torch.float64, Viewed),
]


def train_forms(world: World) -> list[Tensor]:
    found: list[Tensor] = []
    for schedule, per_rank, dtype, kind in FORMS:
        model = wrapped(kind, 2 * per_rank)
        made = optimizers(model, "sgd")
        accelerator = build(world, per_rank)
        accelerator.prepare(model, *made)

        def loss_of_type(output: Tensor, y: Tensor, dtype: torch.dtype = dtype) -> Tensor:
            return token_loss(output, y).to(dtype)

        x, y = tokens(0)
        accelerator.pipeline(model, loss_of_type, schedule=schedule).step(x, target=y)
        made[0].step()
        accelerator.close()
        found.append(flat(model))
    return found


def test_losses_of_any_dtype_and_outputs_of_blocks_of_any_strides() -> None:
    """A schedule gets what it has declared to PyTorch, and stages what they can send, whatever the blocks return."""
    for found in run_ranks(train_forms, 2):
        for (_, per_rank, _, kind), weights in zip(FORMS, found, strict=True):
            assert (weights - by_hand(wrapped(kind, 2 * per_rank), "sgd", sizes=(8,))).abs().max() < CLOSE


# --- one group of four ranks for everything else ---


def count_live_activations(world: World) -> None:
    """Count for how many micro-batches the first stage keeps activations: that is what 1F1B is for."""
    schedules: list[tuple[Any, int]] = [("gpipe", 4), ("1f1b", 2)]
    for schedule, most in schedules:
        model = gpt()
        made = optimizers(model, "adamw")
        accelerator = build(world)
        accelerator.prepare(model, *made)
        live, peak = 0, 0

        def counted(compute: Any, x: Tensor) -> Tensor:
            nonlocal live, peak
            output = compute(x)
            if output.requires_grad:
                live += 1
                peak = max(peak, live)
                output.register_hook(end)
            return output

        def end(gradient: Tensor) -> None:
            nonlocal live
            live -= 1

        for block in model.blocks:
            block.forward = functools.partial(counted, block.forward)
        pipeline = accelerator.pipeline(model, token_loss, schedule=schedule)
        pipeline.step(tokens(0)[0], target=tokens(0)[1])
        for block in model.blocks:
            del block.forward
        accelerator.close()
        if world.rank < 2:  # the ranks of the first stage
            assert (peak, live) == (most, 0), (schedule, peak, live)


def weigh_tokens(world: World) -> None:
    """Train with padding: a mean over tokens is refused, and a sum with its weight is that of one process."""

    def padded(number: int) -> tuple[Tensor, Tensor]:
        x, y = tokens(number)
        y[: 1 + number, LENGTH - 2 :] = IGNORED
        return x, y

    alone, model = gpt(), gpt()
    [optimizer], made = optimizers(alone, "sgd"), optimizers(model, "sgd")
    accelerator = build(world)
    accelerator.prepare(model, *made)
    with pytest.raises(MisuseError, match=r"a mean over tokens return their sum .* weight=number of tokens"):
        accelerator.pipeline(model, token_loss).step(padded(0)[0], target=padded(0)[1])
    made[0].zero_grad()
    pipeline = accelerator.pipeline(model, token_sum)
    share = slice(4 * (world.rank % 2), 4 * (world.rank % 2) + 4)
    for number in range(3):
        x, y = padded(number)
        token_loss(alone(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        own = y[share]
        pipeline.step(x[share], target=own, weight=(own != IGNORED).sum())
        made[0].step()
        made[0].zero_grad()
    accelerator.close()
    assert (flat(model) - flat(alone)).abs().max() < CLOSE


def refuse_unequal_weights(world: World) -> None:
    """A mean over tokens of which the rows of one copy have fewer is refused on every rank."""
    x, y = tokens(0)
    y[4:, 1:] = IGNORED
    model = gpt()
    accelerator = build(world)
    loader = accelerator.prepare(DataLoader(TensorDataset(x, y), batch_size=8))
    accelerator.prepare(model, *optimizers(model, "sgd"))
    pipeline = accelerator.pipeline(model, token_loss)
    for own_x, own_y in loader:
        with pytest.raises(MisuseError, match=r"has the weight 1 in the loss of one rank and 5 in that of another"):
            pipeline.step(own_x, target=own_y)
    accelerator.close()


def train_transformers(world: World) -> None:
    """Train a small Qwen3 by keyword arguments, with masks beside the chain and a frozen first stage."""

    def made_model() -> Any:
        torch.manual_seed(2)
        config = Qwen3Config(
            vocab_size=VOCABULARY, hidden_size=8, intermediate_size=16, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, head_dim=4, tie_word_embeddings=False,
        )  # fmt: skip
        model = Qwen3ForCausalLM(config).double()
        model.model.embed_tokens.requires_grad_(False)
        model.model.layers[0].requires_grad_(False)
        return model

    schedules: tuple[Any, ...] = ("1f1b", "zero_bubble")
    for schedule in schedules:
        alone, model = made_model(), made_model()
        [optimizer], made = optimizers(alone, "sgd"), optimizers(model, "sgd")
        accelerator = build(world, 2)
        accelerator.prepare(model, *made)
        pipeline = accelerator.pipeline(model, lambda output, y: token_loss(output.logits, y), schedule=schedule)
        for number in range(3):
            x, y = tokens(number)
            token_loss(alone(input_ids=x).logits, y).backward()
            optimizer.step()
            optimizer.zero_grad()
            pipeline.step(input_ids=x, attention_mask=torch.ones_like(x), target=y)
            made[0].step()
            made[0].zero_grad()
        accelerator.close()
        assert (flat(model) - flat(alone)).abs().max() < CLOSE, schedule


def mix_with_other_passes(world: World, folder: Path) -> None:
    """Train with plain passes, evaluation and checkpoints between the steps, also in interleaved stages and bf16."""
    expected = by_hand(gpt(num_blocks=4), "adamw", sizes=(8, 8, 8, 8))
    x, y = tokens(9)
    for per_rank, precision, close in ((2, "no", CLOSE), (1, "bf16", 0.2)):
        model = gpt(num_blocks=4)
        made = optimizers(model, "adamw")
        accelerator = build(world, per_rank, mixed_precision=precision)
        accelerator.prepare(model, *made)
        pipeline = accelerator.pipeline(model, token_loss)
        for number, (own_x, own_y) in enumerate(range_of(accelerator, 0, 2)):
            if number:
                accelerator.backward(token_loss(model(own_x), own_y))
            else:
                pipeline.step(own_x, target=own_y)
            made[0].step()
            made[0].zero_grad()
        with torch.no_grad():
            loss = token_loss(model(x), y)
        accelerator.save_state(folder / precision)
        accelerator.close()

        model = gpt(num_blocks=4)
        made = optimizers(model, "adamw")
        accelerator = build(world, 1, mixed_precision=precision)
        accelerator.prepare(model, *made)
        accelerator.load_state(folder / precision)
        with torch.no_grad():
            assert token_loss(model(x), y).item() == pytest.approx(loss.item(), rel=1e-2 if close > CLOSE else 1e-9)
        pipeline = accelerator.pipeline(model, token_loss, schedule="zero_bubble")
        for own_x, own_y in range_of(accelerator, 2, 4):
            pipeline.step(own_x, target=own_y)
            made[0].step()
            made[0].zero_grad()
        accelerator.close()
        assert (flat(model) - expected).abs().max() < close, precision
        with pytest.raises(MisuseError, match="is not prepared"):
            pipeline.step(x, target=y)


def train_without_stages(world: World) -> None:
    """Train the same code without stages."""
    model = gpt()
    made = optimizers(model, "adamw")
    accelerator = build(world, pp=1)
    accelerator.prepare(model, *made)
    pipeline = accelerator.pipeline(model, token_loss)
    for x, y in range_of(accelerator, 0, 2):
        pipeline.step(x, target=y)
        made[0].step()
        made[0].zero_grad()
    accelerator.close()
    assert (flat(model) - by_hand(gpt(), "adamw", sizes=(8, 8))).abs().max() < CLOSE


def train_plain_loop(world: World) -> None:
    """Train an unmodified loop in interleaved stages."""
    model = gpt(num_blocks=4)
    made = optimizers(model, "adamw")
    accelerator = build(world, 2)
    loader = batches(SIZES)
    accelerator.prepare(model, loader, *made)
    train(accelerator, model, made, loader)
    accelerator.close()
    assert (flat(model) - by_hand(gpt(num_blocks=4), "adamw", sizes=SIZES)).abs().max() < CLOSE


def refuse(world: World) -> None:
    model = gpt()
    accelerator = build(world)
    with pytest.raises(MisuseError, match="the Gpt is not prepared"):
        accelerator.pipeline(model, token_loss)
    accelerator.prepare(model, *optimizers(model, "sgd"))
    unknown: Any = "dualpipev"
    with pytest.raises(MisuseError, match="schedule is 'dualpipev'; it must be one of gpipe, 1f1b, zero_bubble"):
        accelerator.pipeline(model, token_loss, schedule=unknown)
    with pytest.raises(MisuseError, match="loss_fn is a Tensor"):
        accelerator.pipeline(model, torch.zeros(()))  # pyright: ignore[reportArgumentType]
    x, y = tokens(0)
    with pytest.raises(MisuseError, match=r"target has a tensor of shape \(40,\), and the batch has 8 rows"):
        accelerator.pipeline(model, token_loss).step(x, target=y.flatten())
    accelerator.close()
    assert (flat(model) - flat(gpt())).abs().max() == 0
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"per_rank": 2, "pp": 1}, "stages are divided among the workers of mesh.pp"),
        ({"per_rank": 0}, "mesh.stages_per_rank"),
    ]
    for options, problem in wrong:
        with pytest.raises(ConfigError, match=problem):
            build(world, **options)
    accelerator = build(world, 2)
    with pytest.raises(MisuseError, match=r"mesh\.pp 2 with mesh\.stages_per_rank 2 needs at least 4 blocks"):
        accelerator.prepare(gpt())
    accelerator.close()


def everything_else(world: World, folder: Path) -> None:
    refuse(world)
    count_live_activations(world)
    weigh_tokens(world)
    refuse_unequal_weights(world)
    train_transformers(world)
    mix_with_other_passes(world, folder)
    train_without_stages(world)
    train_plain_loop(world)


@pytest.mark.nightly
def test_memory_token_weights_transformers_checkpoints_and_refusals(tmp_path: Path) -> None:
    run_ranks(everything_else, 4, tmp_path, timeout_s=200)
