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


class Experts(nn.Module):
    """Experts with stacked weights, computed one after the other."""

    def __init__(self, num_experts: int, factor: float = 1.0) -> None:
        super().__init__()
        self.num_experts, self.factor = num_experts, factor
        self.up = nn.Parameter(torch.randn(num_experts, WIDTH, 12) / 3)
        self.bias = nn.Parameter(torch.randn(num_experts, 12) / 3)
        self.down = nn.Parameter(torch.randn(num_experts, 12, WIDTH) / 3)

    def forward(self, tokens: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        result = torch.zeros_like(tokens)
        for number in range(self.num_experts):
            row, choice = torch.where(indices == number)
            hidden = torch.tanh(tokens[row] @ self.up[number] + self.bias[number]) @ self.down[number]
            result = result.index_add(0, row, self.factor * hidden * weights[row, choice, None])
        return result


class Mixture(nn.Module):
    """A layer that sends each token to two of its experts; with ``last`` all tokens go to the last two."""

    def __init__(self, num_experts: int, last: bool = False) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, num_experts)
        self.experts = Experts(num_experts)
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x).flatten(0, 1)
        scores = self.router(rows)
        if self.last:
            scores = scores + 100.0 * torch.arange(scores.shape[1])
        weights, indices = scores.softmax(-1).topk(2)
        return x + self.experts(rows, indices, weights=weights).view_as(x)


class Block(nn.Module):
    """A block of a small GPT; the dropout acts on whole activations."""

    def __init__(self, num_heads: int, dropout: float, num_experts: int = 0) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention = Attention(num_heads)
        # Halves of 26 rows have 13, which two ranks cannot divide evenly.
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 26), nn.GELU(), nn.Linear(26, WIDTH))
        self.dropout = nn.Dropout(dropout)
        self.mixture = Mixture(num_experts) if num_experts else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norms[0](x)))
        return self.mixture(x + self.dropout(self.mlp(self.norms[1](x))))


class Gpt(nn.Module):
    """A small GPT with a parameter that is one number; its head may be tied, a layer frozen."""

    def __init__(
        self,
        num_heads: int = 4,
        dropout: float = 0.0,
        num_blocks: int = 2,
        num_experts: int = 0,
        *,
        is_tied: bool = True,
        is_frozen: bool = True,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(num_heads, dropout, num_experts) for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if is_tied:
            self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.blocks[1].mlp.requires_grad_(not is_frozen)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden) * self.scale


def gpt(num_heads: int = 4, dropout: float = 0.0, num_blocks: int = 2, **options: Any) -> Gpt:
    torch.manual_seed(5)
    return Gpt(num_heads, dropout, num_blocks, **options).double()


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
    model: nn.Module,
    kind: str = "adamw",
    *,
    sizes: tuple[int, ...],
    clip: float | None = None,
    accumulate: int = 1,
    loss: Any = loss_of,
) -> Tensor:
    """Train in this process and return all weights; ``sizes`` are those of the batches."""
    made: list[Any] = optimizers(model, kind)
    for number, size in enumerate(sizes):
        (loss(model, *tokens(number, size)) / accumulate).backward()
        if (number + 1) % accumulate:
            continue
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        for optimizer in made:
            optimizer.step()
            optimizer.zero_grad()
    return flat(model)
