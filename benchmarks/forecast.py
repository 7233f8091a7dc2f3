"""How accurate is the forecast of a training's memory?

The reference is the allocator's own record of whole training steps on the CPU: forward, backward and AdamW. The peer is
the formula of accelerate's estimate-memory, which counts weights, gradients and optimizer state, but no activations.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from accelerate.commands.estimate import estimate_training_usage
from torch import Tensor, nn

from accel_nb.config.byte_sizes import size_text
from accel_nb.forecast.measurement import default_loss
from accel_nb.forecast.model_building import forecast_model
from accel_nb.forecast.plans import RunSetting
from benchmarks.measure import Figure, Report, main
from tests.support.measured import held_bytes, peak_bytes
from tests.support.transformer import Transformer

WORST_PERCENT = 25
Batch = tuple[Tensor, Tensor]


class Residual(nn.Module):
    """Two convolutions with batch normalization and a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norm, self.again = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        """Return images of the same shape."""
        return torch.relu(x + self.again(self.second(torch.relu(self.norm(self.first(x))))))


class Encoder(nn.Module):
    """torch's own transformer encoder, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True)
        self.embedding = nn.Embedding(1000, 128)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(128, 1000)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits for tokens."""
        return self.head(self.layers(self.embedding(tokens)))


def _perceptron() -> tuple[nn.Module, Batch]:
    layers = [part for _ in range(8) for part in (nn.Linear(512, 512), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(512, 10)), (torch.randn(512, 512), torch.randint(10, (512,)))


def _convolutions() -> tuple[nn.Module, Batch]:
    blocks = [Residual(32) for _ in range(4)]
    model = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(model, nn.Linear(32, 10)), (torch.randn(32, 3, 32, 32), torch.randint(10, (32,)))


def _tokens(vocabulary: int, length: int) -> Batch:
    return torch.randint(vocabulary, (8, length)), torch.randint(vocabulary, (8, length))


MODELS: dict[str, Callable[[], tuple[nn.Module, Batch]]] = {
    "perceptron": _perceptron,
    "residual convolutions": _convolutions,
    "transformer with dropout": lambda: (Encoder(), _tokens(1000, 64)),
    "language model": lambda: (Transformer(1000, 128, 6, 128), _tokens(1000, 128)),
    "language model, large vocabulary": lambda: (Transformer(20_000, 128, 2, 64), _tokens(20_000, 64)),
}


def forecast(quick: bool = False) -> Report:
    """Compare forecast and measured peak of a step for five models in fp32 and bf16."""
    report = Report(
        "Forecast",
        "The peak of training steps with AdamW on one CPU worker, as the allocator records it.",
        ["model", "precision", "measured", "forecast", "forecast / measured", "accelerate / measured", "took"],
    )
    ratios: list[float] = []
    slowest = 0.0
    for name, make in MODELS.items():
        for precision, half in (("no", None), ("bf16", torch.bfloat16)):
            model, batch = make()
            optimizer = torch.optim.AdamW(model.parameters())
            setting = RunSetting(1, "cpu", 2**40, 2**40, precision, len(batch[0]), len(batch[0]), uses_host_memory=True)
            started = time.perf_counter()
            found = forecast_model(model, setting, optimizer=optimizer, batch=batch).plans[0].usage.total
            took = time.perf_counter() - started
            real = _measure(model, optimizer, batch, half)
            size = sum(parameter.nbytes for parameter in model.parameters())
            peer = estimate_training_usage(size, "float32" if half is None else "bfloat16")
            theirs = (peer["model"] + peer["gradients"] + peer["optimizer"]) / real
            report.add(name, precision, size_text(real), size_text(found), found / real, theirs, f"{took:.2f} s")
            ratios.append(found / real)
            slowest = max(slowest, took)
    worst = max(abs(ratio - 1) for ratio in ratios)
    report.figures.append(Figure("peak, largest error of a forecast", 100 * worst, WORST_PERCENT, "%"))
    report.figures.append(Figure("slowest forecast", slowest, 5, "s"))
    return report


def _measure(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, half: torch.dtype | None) -> int:
    def step() -> None:
        x, y = batch[0].clone(), batch[1].clone()
        with nullcontext() if half is None else torch.autocast("cpu", half):
            output = model(x)
        default_loss(output.float(), (x, y)).backward()
        del output
        optimizer.step()
        optimizer.zero_grad()

    step()
    held = held_bytes(model, optimizer)
    return held["parameters"] + held["optimizer"] + peak_bytes(step)


if __name__ == "__main__":
    main(forecast)
