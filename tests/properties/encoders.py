"""Encoders of random programs: the text of a module that maps a batch of inputs to features of shape (batch, 8)."""

from __future__ import annotations

from dataclasses import dataclass

from tests.properties.choices import Choices


@dataclass(frozen=True)
class Encoder:
    """The lines that make an encoder's layers and those that apply them to ``x``."""

    layers: str
    apply: str

    @property
    def text(self) -> str:
        """The source of the class."""
        return write_class("Encoder", self.layers, "x", self.apply)

    @property
    def normalises_batches(self) -> bool:
        """Whether it needs two samples in each batch that it trains on."""
        return "BatchNorm" in self.layers


def _layers(*layers: str) -> Encoder:
    joined = ", ".join(layers)
    return Encoder(f"self.layers = nn.Sequential({joined})", "return self.layers(x)")


_MASKED = """\
mask = (x != 0).to(torch.get_default_dtype()).unsqueeze(2)
e = self.embedding(x) * mask
return torch.tanh(self.last(e.sum(1) / mask.sum(1).clamp(min=1)))"""

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
