"""Parts of the programs: a small random model, samples, and printing of figures."""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
from torch import nn


def choose_package() -> str:
    """Install the alias if the first argument is ``ours``; return which package trains."""
    package = sys.argv[1]
    if package == "ours":
        from accel_nb import compat

        compat.install()
    return package


def small_model() -> Any:
    """Return a causal language model of random weights, the same each time."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=32,
            pad_token_id=0,
        )
    )


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences of random tokens, the same each time."""

    def __init__(self, count: int, length: int = 12) -> None:
        made = torch.randint(1, 64, (count, length), generator=torch.Generator().manual_seed(3))
        self.items = made

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.items[index], "labels": self.items[index]}


def show(name: str, value: float) -> None:
    """Print one figure."""
    assert math.isfinite(value), (name, value)
    print(f"{name}={value:.8f}")


def show_weights(model: nn.Module, name: str = "weights") -> None:
    """Print the sum of the absolute values of all parameters that train."""
    found = [value.detach().double().abs().sum().item() for value in model.parameters() if value.requires_grad]
    show(name, sum(found))


def show_history(trainer: Any) -> None:
    """Print the losses and gradient norms that a trainer has logged."""
    for entry in trainer.state.log_history:
        for key in ("loss", "eval_loss", "grad_norm"):
            if key in entry:
                show(f"{entry['step']}.{key}", float(entry[key]))
