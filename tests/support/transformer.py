"""A small transformer of torch modules, with tied weights, buffers and parameters outside of submodules."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
    """Attention and a feed-forward part, with a table in a buffer and a parameter of its own."""

    def __init__(self, width: int, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, dtype=dtype)
        self.mix = nn.Linear(width, 3 * width, dtype=dtype)
        self.out = nn.Linear(width, width, dtype=dtype)
        self.up = nn.Linear(width, 4 * width, dtype=dtype)
        self.down = nn.Linear(4 * width, width, dtype=dtype)
        self.scale = nn.Parameter(torch.ones(width, dtype=dtype))
        self.register_buffer("table", torch.linspace(0, 1, width, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, length, width)."""
        queries, keys, values = self.mix(self.norm(x)).chunk(3, dim=-1)
        x = x + self.out(functional.scaled_dot_product_attention(queries, keys, values, is_causal=True))
        return x + self.down(functional.gelu(self.up(x))) * self.scale + self.table


class Transformer(nn.Module):
    """A language model; with ``tied`` the head has the embedding's weights."""

    def __init__(
        self,
        vocabulary: int = 64,
        width: int = 32,
        depth: int = 4,
        length: int = 16,
        *,
        tied: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width, dtype=dtype)
        self.positions = nn.Parameter(torch.randn(length, width, dtype=dtype) * 0.1)
        self.blocks = nn.ModuleList(Block(width, dtype) for _ in range(depth))
        self.norm = nn.LayerNorm(width, dtype=dtype)
        self.head = nn.Linear(width, vocabulary, bias=False, dtype=dtype)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (batch, length, vocabulary) for tokens (batch, length)."""
        x = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
