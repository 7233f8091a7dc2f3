"""Models whose experts are divided among ranks: the weights are those of one process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.tensor  # imported once, before ranks are forked
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssForCausalLM
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeForCausalLM

from accel_nb.accelerator import Accelerator
from accel_nb.errors import ConfigError, MisuseError
from accel_nb.runtime.distributed import sharded
from accel_nb.runtime.world import World
from tests.ranks.launch import run_ranks
from tests.ranks.mesh_models import VOCABULARY, WIDTH, Experts, Mixture, by_hand, flat, optimizers, tokens
from tests.ranks.mesh_training import (
    CLOSE,
    assert_equal_copies,
    assert_weights,
    batches,
    range_of,
    train,
)
from tests.support.nightly import nightly

SIZES = (8, 8, 8, 8)


class Sparse(nn.Module):
    """A small language model with mixtures of experts between dense layers, and a tied head."""

    def __init__(self, num_experts: int = 4, last: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(Mixture(num_experts, last), nn.Linear(WIDTH, WIDTH)) for _ in "ab")
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def sparse(num_experts: int = 4, last: bool = False) -> Sparse:
    torch.manual_seed(5)
    return Sparse(num_experts, last).double()


def build(world: World, ep: int = 2, **options: Any) -> Accelerator:
    config = {"mesh": {"ep": ep}, "batch": "global", **options.pop("config", {})}
    return Accelerator(world=world, cpu=True, config=config, **options)


def one_case(
    world: World, kind: str, strategy: str, clip: float | None, accumulate: int, ep: int = 2, last: bool = False
) -> Tensor:
    model = sparse(last=last)
    made = optimizers(model, kind)
    accelerator = build(world, ep, strategy=strategy, gradient_accumulation_steps=accumulate)
    loader = batches(SIZES)
    accelerator.prepare(model, loader, *made)
    up = model.get_parameter("layers.0.0.experts.up")
    parts = 1 if strategy != "fsdp" else world.size // ep
    assert sharded.num_copies(up, world.size) == world.size // ep // parts
    train(accelerator, model, made, loader, clip)
    assert_equal_copies(accelerator, model)
    whole = accelerator.get_state_dict(model)
    accelerator.close()
    assert model.head.weight is model.embed.weight
    assert all(torch.equal(whole[name], value) for name, value in model.state_dict().items())
    experts: Any = model.get_submodule("layers.0.0.experts")
    assert type(experts) is Experts
    assert experts.num_experts == 4
    return flat(model)


# The last case sends all tokens to the experts of one rank, and none to the others.
CASES: list[tuple[Any, ...]] = [
    ("adamw", "auto", None, 1),
    ("two", "ddp", 0.05, 2),
    ("sgd", "fsdp", 0.05, 1),
    ("adamw", "auto", None, 1, 2, True),
]


GROUPS = [(2, CASES), nightly(4, [*CASES, ("adamw", "fsdp", 0.05, 1, 4)])]
if os.environ.get("MESH") == "all":
    GROUPS.append((8, [(*case[:4], ep) for case in CASES for ep in (2, 4)]))


@pytest.mark.parametrize(("size", "cases"), GROUPS)
def test_weights_equal_those_of_one_process(size: int, cases: list[Any]) -> None:
    expected = [
        by_hand(sparse(last=any(last)), kind, sizes=SIZES, clip=clip, accumulate=k)
        for kind, _, clip, k, _, *last in [(*case, 2) if len(case) == 4 else case for case in cases]
    ]
    assert_weights(one_case, size, cases, expected)


# --- one group of four ranks for everything else ---


def continue_checkpoints(world: World, folder: Path) -> None:
    """Save in the middle of a training in one mesh, and go on in another."""
    expected = by_hand(sparse(), "adamw", sizes=(8, 8, 8, 8))
    layouts: list[dict[str, Any]] = [{"strategy": "fsdp"}, {"ep": 4}, {"ep": 1, "strategy": "ddp"}]
    for number, options in enumerate(layouts):
        saved, loaded = options, layouts[(number + 1) % len(layouts)]
        for used, first in ((saved, 0), (loaded, 2)):
            model = sparse()
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


def train_transformers(world: World) -> None:
    """Train small models of transformers, and generate text."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "head_dim": 4,
        "num_attention_heads": 2, "num_key_value_heads": 2, "num_experts_per_tok": 2, "pad_token_id": 0,
    }  # fmt: skip
    configs: list[tuple[Any, Any, torch.dtype, float]] = [
        (Qwen3MoeForCausalLM, Qwen3MoeConfig(**sizes, moe_intermediate_size=12, num_experts=8), torch.float64, CLOSE),
        # Grouped products, which are the default, compute no float64.
        (GptOssForCausalLM, GptOssConfig(**sizes, num_local_experts=4), torch.float32, 1e-5),
    ]
    for kind, config, dtype, close in configs:

        def made_model(kind: Any = kind, config: Any = config, dtype: torch.dtype = dtype) -> Any:
            torch.manual_seed(2)
            way = "eager" if dtype is torch.float64 else "grouped_mm"
            return kind._from_config(config, experts_implementation=way).to(dtype)

        def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(model(input_ids=x).logits.flatten(0, 1), y.flatten())

        alone, model = made_model(), made_model()
        [optimizer], made = optimizers(alone, "sgd"), optimizers(model, "sgd")
        for number in range(3):
            loss(alone, *tokens(number)).backward()
            optimizer.step()
            optimizer.zero_grad()
        accelerator = build(world, ep=4)
        accelerator.prepare(model, *made)
        train(accelerator, model, made, range_of(accelerator, 0, 3), loss=loss)
        notes = str(accelerator.describe()["notes"])
        assert "mesh dp_replicate 4 x ep 4 (rank 3 is dp 3, ep 3)" in notes
        assert f"experts {'2 of 8' if kind is Qwen3MoeForCausalLM else '1 of 4'} on each worker, in 2 modules" in notes
        assert 1 <= accelerator.components.stepper.strategy.statistics()["busiest expert"] <= 4
        x = tokens(0)[0][:2]
        assert torch.equal(model.generate(x, max_new_tokens=4), alone.generate(x, max_new_tokens=4))
        accelerator.close()
        assert (flat(model) - flat(alone)).abs().max() < close


def train_otherwise(world: World) -> None:
    """Train with activations recomputed, which changes nothing, and in bf16, which changes little."""
    expected = by_hand(sparse(), "adamw", sizes=(8, 8))
    cases: list[tuple[dict[str, Any], float]] = [
        ({"config": {"activation_checkpointing": True}}, CLOSE),
        ({"config": {"fsdp": {"hybrid_shard_size": 2}}, "strategy": "fsdp"}, CLOSE),
        ({"mixed_precision": "bf16", "strategy": "fsdp"}, 0.2),
    ]
    for options, close in cases:
        model = sparse()
        made = optimizers(model, "adamw")
        accelerator = build(world, **options)
        accelerator.prepare(model, *made)
        train(accelerator, model, made, range_of(accelerator, 0, 2))
        accelerator.close()
        assert (flat(model) - expected).abs().max() < close, options


class Normed(Experts):
    """Experts whose result for a token depends on the other tokens."""

    def forward(self, tokens: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        return super().forward(tokens - tokens.mean(0), indices, weights)


def refuse(world: World) -> None:
    """Refuse, on every rank and before a weight is changed, what cannot be divided."""
    accelerator = build(world)
    odd, normed = sparse(3), sparse()
    for layer in normed.layers:
        layer[0].experts = Normed(4)
    problems: list[tuple[nn.Module, str]] = [
        (nn.Linear(2, 2), r"the Linear has no experts that mesh\.ep 2 can divide \(no module has num_experts\): train"),
        (
            odd,
            r"layers\.0\.0\.experts of the Sparse has 3 experts, which mesh\.ep 2 does not divide: use mesh\.ep 1, 3",
        ),
        (normed.double(), "Normed: its parts compute something else than the whole"),
    ]
    for model, problem in problems:
        with pytest.raises(MisuseError, match=problem):
            accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert all(type(value) is nn.Parameter for value in model.parameters())
    model = sparse()
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(MisuseError, match=r"called with tensors of shapes \[1, 2, 8\], \[2, 2\], \[2, 2\]: it takes"):
        model.get_submodule("layers.0.0.experts")(torch.zeros(1, 2, 8), torch.zeros(2, 2).long(), torch.zeros(2, 2))
    accelerator.close()
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"ep": 3}, "mesh.ep is 3, which does not divide the 4 workers; use one of 1, 2, 4"),
        ({"strategy": "single"}, "strategy single does not divide experts; use auto, ddp, fsdp"),
        ({"mixed_precision": "fp16"}, "divided experts support precision no, bf16 and auto"),
        ({"config": {"mesh": {"ep": 2, "pp": 2}}}, "expert and pipeline parallelism cannot be combined"),
        (
            {"config": {"mesh": {"ep": 4, "tp": 2}}},
            "mesh.ep is 4, which does not divide the 2 workers that remain of 4 after mesh.tp 2; use one of 1, 2",
        ),
    ]
    for options, problem in wrong:
        with pytest.raises(ConfigError, match=problem):
            build(world, **options)


def everything_else(world: World, folder: Path) -> None:
    refuse(world)
    train_transformers(world)
    train_otherwise(world)
    continue_checkpoints(world, folder)


@pytest.mark.nightly
def test_checkpoints_transformers_and_refusals(tmp_path: Path) -> None:
    run_ranks(everything_else, 4, tmp_path, timeout_s=200)
