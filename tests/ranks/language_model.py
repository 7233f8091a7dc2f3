"""A small language model for tests of sharded strategies."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 11


class Block(nn.Module):
    """A layer with a norm and a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Language(nn.Module):
    """Tied embeddings, a parameter that is one number, a frozen part, blocks, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(6, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("offset", torch.full((6,), 0.1))
        self.blocks[1].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x) + self.offset
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden) * self.scale

    def encode(self, x: Tensor) -> Tensor:
        return self.embed(x)


def tokens(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(VOCABULARY, (12, 5), generator=generator), torch.randint(
        VOCABULARY, (12, 5), generator=generator
    )


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def flat(model: nn.Module) -> Tensor:
    return torch.cat([value.detach().flatten() for value in model.parameters()])
