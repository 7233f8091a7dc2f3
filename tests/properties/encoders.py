"""Encoders of random programs: the text of a module that maps a batch of inputs to features of shape (batch, 8)."""

from __future__ import annotations

from dataclasses import dataclass

from tests.properties.choices import Choices


@dataclass(frozen=True)
class Encoder:
    """The lines that make an encoder's layers and those that apply them to ``x``."""

    layers: str
    apply: str
    before: str = ""
    """Classes and functions that the module uses."""

    @property
    def text(self) -> str:
        """The source of the class, and of what it uses."""
        written = write_class("Encoder", self.layers, "x", self.apply)
        return f"{self.before}\n{written}" if self.before else written

    @property
    def normalizes_batches(self) -> bool:
        """Whether it needs two samples in each batch that it trains on."""
        return "BatchNorm" in self.layers


def _layers(*layers: str) -> Encoder:
    joined = ", ".join(layers)
    return Encoder(f"self.layers = nn.Sequential({joined})", "return self.layers(x)")


_MASKED = """\
mask = (x != 0).to(torch.get_default_dtype()).unsqueeze(2)
e = self.embedding(x) * mask
return torch.tanh(self.last(e.sum(1) / mask.sum(1).clamp(min=1)))"""

_ROUNDED = """\
class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x)
        ctx.scale = scale
        return torch.round(x * scale) / scale
    @staticmethod
    def backward(ctx, gradient):
        x, = ctx.saved_tensors
        return gradient * (x.abs() < ctx.scale), None"""
_REVERSED = """\
class Reversed(torch.autograd.Function):
    calls = 0
    @staticmethod
    def forward(ctx, x):
        Reversed.calls += 1
        return x.view_as(x)
    @staticmethod
    def backward(ctx, gradient):
        return -0.1 * gradient"""
_SQUASHED = """\
class Squashed(nn.Module):
    def forward(self, weight):
        return torch.tanh(weight) * 0.8"""
_COUNTED = """\
class Counted(nn.Linear):
    num_calls = 0
    def forward(self, x):
        Counted.num_calls += 1
        return super().forward(x) * (1 + 0.02 * Counted.num_calls)"""
_STANDARDISED = """\
class Standardised(nn.Linear):
    @property
    def standard(self):
        return (self.weight - self.weight.mean(1, keepdim=True)) / (self.weight.std(1, keepdim=True) + 0.1)
    def forward(self, x):
        return F.linear(x, self.standard, self.bias)"""
_INIT = """\
def start(module):
    if isinstance(module, nn.Linear):
        nn.init.orthogonal_(module.weight)
        nn.init.constant_(module.bias, 0.1)"""
_LOW_RANK = """\
class LowRank(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(2, 5) * 0.3), nn.Parameter(torch.zeros(8, 2))
    def forward(self, x):
        return self.inner(x) + x @ self.a.T @ self.b.T"""

ENCODERS: dict[str, dict[str, Encoder]] = {
    "vectors": {
        "mlp": _layers("nn.Linear(5, 8)", "nn.Tanh()"),
        "relu": _layers("nn.Linear(5, 12)", "nn.ReLU()", "nn.Linear(12, 8)"),
        "batch norm": _layers("nn.Linear(5, 8)", "nn.BatchNorm1d(8)", "nn.Tanh()"),
        "layer norm": _layers("nn.Linear(5, 8)", "nn.LayerNorm(8)", "nn.GELU()"),
        "group norm": _layers("nn.Linear(5, 8)", "nn.GroupNorm(2, 8)", "nn.Tanh()"),
        "dropout": _layers("nn.Linear(5, 8)", "nn.Tanh()", "nn.Dropout(0.3)"),
        "noise": Encoder(
            "self.first = nn.Linear(5, 8)", "return torch.tanh(self.first(x + 0.1 * torch.randn_like(x)))"
        ),
        "spectral norm": _layers("nn.utils.parametrizations.spectral_norm(nn.Linear(5, 8))", "nn.Tanh()"),
        "weight norm": _layers("nn.utils.parametrizations.weight_norm(nn.Linear(5, 8))", "nn.Tanh()"),
        "frozen": Encoder(
            "self.first = nn.Linear(5, 8).requires_grad_(False)\nself.second = nn.Linear(8, 8)",
            "return self.second(torch.tanh(self.first(x)))",
        ),
        "tied": Encoder(
            "self.first, self.inner, self.third = nn.Linear(5, 8), nn.Linear(8, 5), nn.Linear(5, 8)\n"
            "self.third.weight = self.first.weight",
            "return torch.tanh(self.third(self.inner(torch.tanh(self.first(x)))))",
        ),
        "unused layer": Encoder(
            "self.first = nn.Linear(5, 8)\nself.unused = nn.Linear(8, 8)", "return torch.tanh(self.first(x))"
        ),
        "centred features": Encoder(
            "self.first = nn.Linear(5, 8)", "h = torch.tanh(self.first(x))\nreturn h - h.mean(0)"
        ),
        "attention over samples": Encoder(
            "self.first = nn.Linear(5, 8)",
            "h = torch.tanh(self.first(x))\nreturn h + torch.softmax(h @ h.T, dim=1) @ h",
        ),
        "running mean": Encoder(
            "self.first = nn.Linear(5, 8)\nself.register_buffer('mean', torch.zeros(5))",
            "if self.training:\n    self.mean.lerp_(x.detach().mean(0), 0.1)\n"
            "return torch.tanh(self.first(x - self.mean))",
        ),
        "queue": Encoder(
            "self.first = nn.Linear(5, 8)\nself.register_buffer('queue', torch.zeros(16, 8))",
            "h = torch.tanh(self.first(x))\nweights = (h @ self.queue.T).softmax(1)\nout = h + weights @ self.queue\n"
            "if self.training:\n    self.queue = torch.cat([h.detach(), self.queue])[:16]\nreturn out",
        ),
        "counter": Encoder(
            "self.first = nn.Linear(5, 8)\nself.calls = 0",
            "self.calls += 1\nreturn torch.tanh(self.first(x)) / (1 + 0.05 * self.calls)",
        ),
        "index of the sample": Encoder(
            "self.first = nn.Linear(5, 8)", "return torch.tanh(self.first(x) + 0.1 * torch.arange(x.size(0))[:, None])"
        ),
        "divided by the batch size": Encoder(
            "self.first = nn.Linear(5, 8)", "return 4 * torch.tanh(self.first(x)) / x.size(0)"
        ),
        "branch on the batch": Encoder(
            "self.first, self.second = nn.Linear(5, 8), nn.Linear(5, 8)",
            "return torch.tanh(self.first(x) if x.sum() > 0 else self.second(x))",
        ),
        "branch on the sample": Encoder(
            "self.first, self.second = nn.Linear(5, 8), nn.Linear(5, 8)",
            "return torch.tanh(torch.where(x.sum(1, keepdim=True) > 0, self.first(x), self.second(x)))",
        ),
        "selected rows": Encoder(
            "self.first, self.second = nn.Linear(5, 8), nn.Linear(8, 8)",
            "h = torch.tanh(self.first(x))\nout = h.clone()\nchosen = x[:, 0] > 0\n"
            "out[chosen] = self.second(h[chosen])\nreturn out",
        ),
        "loop over samples": Encoder(
            "self.first = nn.Linear(5, 8)", "return torch.stack([torch.tanh(self.first(row)) for row in x])"
        ),
        "checkpointed": Encoder(
            "self.first = nn.Sequential(nn.Linear(5, 8), nn.Tanh())",
            "return torch.utils.checkpoint.checkpoint(self.first, x, use_reentrant=False)",
        ),
        "rounded": Encoder(
            "self.first = nn.Linear(5, 8)", "return Rounded.apply(torch.tanh(self.first(x)), 4)", _ROUNDED
        ),
        "reversed gradient": Encoder(
            "self.first, self.second = nn.Linear(5, 8), nn.Linear(8, 8)",
            "h = torch.tanh(self.first(x))\nreturn h + self.second(Reversed.apply(h))",
            _REVERSED,
        ),
        "parametrized": Encoder(
            "self.first = nn.Linear(5, 8)\n"
            "torch.nn.utils.parametrize.register_parametrization(self.first, 'weight', Squashed())",
            "return torch.tanh(self.first(x))",
            _SQUASHED,
        ),
        "counter of the class": Encoder("self.first = Counted(5, 8)", "return torch.tanh(self.first(x))", _COUNTED),
        "property as a weight": Encoder(
            "self.first = Standardised(5, 8)", "return torch.tanh(self.first(x))", _STANDARDISED
        ),
        "weights by apply": Encoder(
            "self.layers = nn.Sequential(nn.Linear(5, 8), nn.Tanh()).apply(start)", "return self.layers(x)", _INIT
        ),
        "low rank": Encoder("self.first = LowRank(nn.Linear(5, 8))", "return torch.tanh(self.first(x))", _LOW_RANK),
        "complex": Encoder(
            "self.first = nn.Linear(5, 8)",
            "h = torch.view_as_complex(self.first(x).view(-1, 4, 2))\n"
            "return torch.view_as_real(h * h.conj() + 0.5 * h).flatten(1)",
        ),
        "fourier features": Encoder(
            "self.first = nn.Linear(6, 8)",
            "f = torch.fft.rfft(x, dim=1)\nreturn torch.tanh(self.first(torch.cat([f.real, f.imag], 1)))",
        ),
        "clusters": Encoder(
            "self.first = nn.Linear(5, 8)\nself.centres = nn.Parameter(torch.randn(3, 8))",
            "h = torch.tanh(self.first(x))\nnearest = torch.cdist(h, self.centres).argmin(1)\n"
            "sums = torch.zeros(3, 8).index_add(0, nearest, h)\n"
            "counts = torch.bincount(nearest, minlength=3).clamp(min=1)\n"
            "return h + 0.2 * (sums / counts[:, None])[nearest]",
        ),
        "experts": Encoder(
            "self.gate, self.experts = nn.Linear(5, 3), nn.ModuleList([nn.Linear(5, 8) for _ in range(3)])",
            "chosen = self.gate(x).softmax(1)\nvalue, index = chosen.max(1)\nout = x.new_zeros(len(x), 8)\n"
            "for number, expert in enumerate(self.experts):\n    rows = (index == number).nonzero().squeeze(1)\n"
            "    out = out.index_copy(0, rows, expert(x[rows]) * value[rows, None])\nreturn torch.tanh(out)",
        ),
        "buffer made late": Encoder(
            "self.first = nn.Linear(5, 8)",
            "if not hasattr(self, 'scale'):\n    self.register_buffer('scale', x.detach().std(0) + 0.5)\n"
            "return torch.tanh(self.first(x / self.scale))",
        ),
        "running norm": Encoder(
            "self.first, self.seen = nn.Linear(5, 8), []",
            "h = torch.tanh(self.first(x))\nif self.training:\n    self.seen.append(h.detach().norm().item())\n"
            "return h / (1 + 0.01 * sum(self.seen))",
        ),
        "autocast": Encoder(
            "self.first = nn.Linear(5, 8)",
            "with torch.autocast('cpu', enabled=False):\n    return torch.tanh(self.first(x))",
        ),
    },
    "images": {
        "conv": _layers("nn.Conv2d(2, 4, 3)", "nn.Tanh()", "nn.AdaptiveAvgPool2d((2, 1))", "nn.Flatten()"),
        "conv batch norm": _layers(
            "nn.Conv2d(2, 4, 3)", "nn.BatchNorm2d(4)", "nn.ReLU()", "nn.MaxPool2d((1, 3))", "nn.Flatten()",
            "nn.Linear(12, 8)",
        ),
        "conv group norm": _layers(
            "nn.Conv2d(2, 4, 3)", "nn.GroupNorm(2, 4)", "nn.SiLU()", "nn.Flatten()", "nn.Linear(36, 8)"
        ),
        "conv dropout": _layers("nn.Conv2d(2, 4, 3)", "nn.Dropout2d(0.3)", "nn.Flatten()", "nn.Linear(36, 8)"),
    },
    "sequences": {
        "gru": Encoder("self.rnn = nn.GRU(3, 8, batch_first=True)", "return self.rnn(x)[0][:, -1]"),
        "lstm": Encoder("self.rnn = nn.LSTM(3, 8, batch_first=True)", "return self.rnn(x)[1][0][-1]"),
        "rnn": Encoder("self.rnn = nn.RNN(3, 8, batch_first=True)", "return self.rnn(x)[0].mean(1)"),
        "gru, time first": Encoder("self.rnn = nn.GRU(3, 8)", "return self.rnn(x.transpose(0, 1))[0][-1]"),
        "lstm, both directions": Encoder(
            "self.rnn = nn.LSTM(3, 4, num_layers=2, batch_first=True, bidirectional=True)",
            "return self.rnn(x)[0][:, 0]",
        ),
        "cells": Encoder(
            "self.cell = nn.GRUCell(3, 8)",
            "h = torch.zeros(x.size(0), 8)\nfor step in x.unbind(1):\n    h = self.cell(step, h)\nreturn h",
        ),
        "transformer": Encoder(
            "self.first = nn.Linear(3, 8)\n"
            "self.layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)",
            "return self.layer(self.first(x)).mean(1)",
        ),
        "transformer with dropout": Encoder(
            "self.first = nn.Linear(3, 8)\n"
            "self.layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.1, batch_first=True)",
            "return self.layer(self.first(x)).mean(1)",
        ),
        "conv1d": Encoder("self.conv = nn.Conv1d(3, 8, 2)", "return torch.tanh(self.conv(x.transpose(1, 2))).mean(2)"),
    },
    "tokens": {
        "embedding": Encoder(
            "self.embedding = nn.Embedding(11, 8)", "return torch.tanh(self.embedding(x).mean(1))"
        ),
        "padded embedding": Encoder(
            "self.embedding = nn.Embedding(11, 8, padding_idx=0)\nself.last = nn.Linear(8, 8)", _MASKED
        ),
        "embedding bag": Encoder("self.bag = nn.EmbeddingBag(11, 8)", "return torch.tanh(self.bag(x))"),
        "embedding lstm": Encoder(
            "self.embedding = nn.Embedding(11, 5)\nself.rnn = nn.LSTM(5, 8, batch_first=True)",
            "return self.rnn(self.embedding(x))[0][:, -1]",
        ),
        "tied head": Encoder(
            "self.embedding = nn.Embedding(11, 8)",
            "h = torch.tanh(self.embedding(x).mean(1))\nreturn h + 0.1 * (h @ self.embedding.weight.T)[:, :8]",
        ),
        "causal transformer": Encoder(
            "self.embedding = nn.Embedding(11, 8)\n"
            "self.layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)",
            "mask = nn.Transformer.generate_square_subsequent_mask(x.size(1))\n"
            "return self.layer(self.embedding(x), src_mask=mask)[:, -1]",
        ),
    },
    "texts": {
        "padded embedding": Encoder(
            "self.embedding = nn.Embedding(11, 8, padding_idx=0)\nself.last = nn.Linear(8, 8)", _MASKED
        ),
        "packed gru": Encoder(
            "self.embedding = nn.Embedding(11, 5)\nself.rnn = nn.GRU(5, 8, batch_first=True)",
            "lengths = (x != 0).sum(1)\n"
            "packed = nn.utils.rnn.pack_padded_sequence(\n"
            "    self.embedding(x), lengths, batch_first=True, enforce_sorted=False\n)\n"
            "return self.rnn(packed)[1][-1]",
        ),
        "transformer": Encoder(
            "self.embedding = nn.Embedding(11, 8)\n"
            "self.layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)",
            "h = self.layer(self.embedding(x), src_key_padding_mask=x == 0)\nreturn h[:, 0]",
        ),
    },
}  # fmt: skip


def pick_encoder(choices: Choices, inputs: str) -> Encoder:
    """Return one of the encoders for a kind of input."""
    return ENCODERS[inputs][choices.pick("encoder", *ENCODERS[inputs], simple=0.35)]


def write_class(name: str, layers: str, arguments: str, apply: str) -> str:
    """Return the source of a module's class."""
    return (
        f"class {name}(nn.Module):\n    def __init__(self):\n        super().__init__()\n{indent(layers, 2)}\n"
        f"    def forward(self, {arguments}):\n{indent(apply, 2)}"
    )


def indent(text: str, levels: int = 1) -> str:
    """Return the lines of a text, each moved to the right."""
    return "\n".join("    " * levels + line for line in text.splitlines())
