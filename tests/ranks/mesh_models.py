"""Models and training loops for tests of meshes, with what one process makes of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, WIDTH, LENGTH = 11, 8, 5


class Attention(nn.Module):
    """Self-attention with separate projections, and a number of heads that its forward uses."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (part(x).view(batch, length, self.num_heads, -1).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, -1))


class Block(nn.Module):
    """A block of a small GPT; the dropout acts on whole activations."""

    def __init__(self, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention = Attention(num_heads)
        # Halves of 26 rows have 13, which two ranks cannot divide evenly.
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 26), nn.GELU(), nn.Linear(26, WIDTH))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norms[0](x)))
        return x + self.dropout(self.mlp(self.norms[1](x)))


class Gpt(nn.Module):
    """A small GPT with a tied head, a frozen layer and a parameter that is one number."""

    def __init__(self, num_heads: int = 4, dropout: float = 0.0, num_blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(num_heads, dropout) for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.blocks[1].mlp.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden) * self.scale


def gpt(num_heads: int = 4, dropout: float = 0.0, num_blocks: int = 2) -> Gpt:
    torch.manual_seed(5)
    return Gpt(num_heads, dropout, num_blocks).double()


def tokens(number: int, size: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    x, y = torch.randint(VOCABULARY, (2, size, LENGTH), generator=generator)
    return x, y


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def optimizers(model: nn.Module, kind: str) -> list[torch.optim.Optimizer]:
    """Return one optimizer, or with ``two`` another one for the embedding."""
    named = [(name, value) for name, value in model.named_parameters() if value.requires_grad]
    if kind == "two":
        first = [value for name, value in named if "embed" not in name]
        second = [value for name, value in named if "embed" in name]
        return [torch.optim.AdamW(first, lr=0.02), torch.optim.SGD(second, lr=0.1, momentum=0.9)]
    values = [value for _, value in named]
    return [torch.optim.SGD(values, lr=0.1, momentum=0.9) if kind == "sgd" else torch.optim.AdamW(values, lr=0.02)]


def flat(model: nn.Module) -> Tensor:
    return torch.cat([value.detach().flatten() for value in model.parameters()])


def by_hand(
    model: nn.Module, kind: str = "adamw", *, sizes: tuple[int, ...], clip: float | None = None, accumulate: int = 1
) -> Tensor:
    """Train in this process and return all weights; ``sizes`` are those of the batches."""
    made: list[Any] = optimizers(model, kind)
    for number, size in enumerate(sizes):
        (loss_of(model, *tokens(number, size)) / accumulate).backward()
        if (number + 1) % accumulate:
            continue
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        for optimizer in made:
            optimizer.step()
            optimizer.zero_grad()
    return flat(model)
