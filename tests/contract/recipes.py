"""One small training run in float64, written by hand for one process, and the same run on an accelerator."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_nb.accelerator import Accelerator
from accel_nb.accelerator.plain_cells.autoprepare import PlainCells
from accel_nb.config import Layer, using_layers
from accel_nb.runtime.world import World
from accel_nb.strategies import StrategyRegistry
from tests.ranks.launch import run_ranks

WORLDS = [
    (strategy, size)
    for size in (1, 2, 3)
    for strategy in StrategyRegistry().names
    if StrategyRegistry().get(strategy).capabilities.fits(World(size=size))
]
"""Every installed strategy on every small world that it serves."""


STRATEGIES = sorted({name for name, _ in WORLDS})
OTHER_WAYS: dict[str, dict[str, Any]] = {
    f"deepspeed {stage}": {"deepspeed.zero_stage": stage, "deepspeed.persistent_size": 10}
    for stage in (1, 3)
    if "deepspeed" in STRATEGIES
}
"""Beside strategies with their defaults: stages, which differ in all that a strategy does."""


def on_smallest_world(way: str, fn: Any, *args: Any) -> list[Any]:
    """Run ``fn(world, strategy, *args)`` on the smallest world that the strategy of a way serves."""
    strategy, options = way.partition(" ")[0], OTHER_WAYS.get(way, {})
    size = StrategyRegistry().get(strategy).capabilities.min_world
    if size == 1:
        return [in_the_way(World(), options, fn, strategy, *args)]
    return run_ranks(in_the_way, size, options, fn, strategy, *args)


def in_the_way(world: World, options: dict[str, Any], fn: Any, *args: Any) -> Any:
    """Run ``fn(world, *args)`` with options that hold for every accelerator in it."""
    with using_layers([Layer("flags", options, "test")]):
        return fn(world, *args)


def dtype_of(strategy: str) -> torch.dtype:
    """What weights are in where nothing is to be rounded: float64, or what the strategy steps."""
    return StrategyRegistry().get(strategy).capabilities.stepped_dtype or torch.float64


EXACT = [place for place in WORLDS if dtype_of(place[0]) is torch.float64]
COARSE = [place for place in WORLDS if dtype_of(place[0]) is not torch.float64]
"""Worlds of strategies that can be compared closely, and of the others."""


def tolerance(strategy: str, exact: float) -> float:
    """How far weights may be from those of one process: ``exact``, or a few roundings of float32."""
    return exact if dtype_of(strategy) is torch.float64 else 2e-6


SCALE = 2.0**10
"""Of losses in fp16: small enough that no step is skipped."""


@dataclass(frozen=True)
class Recipe:
    """What to train and how; ``num_samples`` that the batch does not divide leaves a tail."""

    num_samples: int = 23
    batch: int = 6
    epochs: int = 2
    accumulate: int = 1
    clip: float | None = None
    reduction: str = "mean"
    optimizer: str = "sgd"
    scheduler: bool = False
    precision: str = "no"

    @property
    def compute(self) -> torch.dtype | None:
        """The dtype of autocast, if there is one."""
        return {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}[self.precision]


def parts(recipe: Recipe, *, dtype: torch.dtype | None = None) -> tuple[Any, ...]:
    """Return model, optimizer, scheduler and loader, the same in every process; in float64 where nothing is rounded."""
    dtype = dtype or (torch.float64 if recipe.compute is None else torch.float32)
    torch.manual_seed(11)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)
    if recipe.optimizer == "sgd":
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    x, y = torch.randn(recipe.num_samples, 5, dtype=dtype), torch.randn(recipe.num_samples, 3, dtype=dtype)
    loader = DataLoader(TensorDataset(x, y), batch_size=recipe.batch, shuffle=True)
    return model, optimizer, scheduler, loader


def loss_of(recipe: Recipe, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the recipe's loss: a mean or a sum over samples."""
    return nn.functional.mse_loss(output, target, reduction=recipe.reduction)


@cache
def by_hand(recipe: Recipe) -> dict[str, torch.Tensor]:
    """Train in one plain process, as a careful person would write it, and return the weights."""
    model, optimizer, scheduler, loader = parts(recipe)
    scale = SCALE if recipe.precision == "fp16" else 1.0
    for _ in range(recipe.epochs):
        window = 0
        for number, (x, y) in enumerate(loader, 1):
            with torch.autocast("cpu", dtype=recipe.compute, enabled=recipe.compute is not None):
                output = model(x)
            (loss_of(recipe, output.to(x.dtype), y) * scale).backward()
            window += 1
            if window < recipe.accumulate and number < len(loader):
                continue
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad /= window * scale
            if recipe.clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
            optimizer.step()
            if recipe.scheduler:
                scheduler.step()
            optimizer.zero_grad()
            window = 0
    return weights_of(model)


def parts_for(strategy: str | None, recipe: Recipe) -> tuple[Any, ...]:
    """Return the parts in what the strategy steps; the same numbers, but for rounding."""
    model, optimizer, scheduler, loader = parts(recipe)
    exact = torch.float64 if strategy is None else dtype_of(strategy)
    dtype = exact if recipe.compute is None else torch.float32
    model.to(dtype)
    data = TensorDataset(*(value.to(dtype) for value in loader.dataset.tensors))
    return model, optimizer, scheduler, DataLoader(data, batch_size=recipe.batch, shuffle=True)


def explicit(
    world: World, recipe: Recipe, *, strategy: str | None = None, config: dict[str, Any] | None = None, **options: Any
) -> dict[str, torch.Tensor]:
    """Train the recipe with the explicit API, the loader's batch being everybody's."""
    model, optimizer, scheduler, loader = parts_for(strategy, recipe)
    accelerator = Accelerator(
        world=world, gradient_accumulation_steps=recipe.accumulate, batch="global", cpu=True,
        mixed_precision=recipe.precision, config={"scaler": {"init_scale": SCALE}} | (config or {}),
        strategy=strategy, **options,
    )  # type: ignore[arg-type]  # fmt: skip
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    for _ in range(recipe.epochs):
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(recipe, model(x), y))
                if recipe.clip is not None:
                    accelerator.clip_grad_norm_(model.parameters(), recipe.clip)
                optimizer.step()
                if recipe.scheduler:
                    scheduler.step()
                optimizer.zero_grad()
    accelerator.close()
    return weights_of(model)


def plain(world: World, recipe: Recipe, *, strategy: str, zero_first: bool = False) -> dict[str, torch.Tensor]:
    """Train the recipe as a plain cell; accumulation and clipping come from the options."""
    model, optimizer, scheduler, loader = parts_for(strategy, recipe)
    accelerator = Accelerator(
        world=world, gradient_accumulation_steps=recipe.accumulate, clip=recipe.clip, cpu=True,
        mixed_precision=recipe.precision, config={"scaler": {"init_scale": SCALE}}, strategy=strategy,
    )  # type: ignore[arg-type]  # fmt: skip
    cells = PlainCells(accelerator)
    cells.prepare(locals(), ["model", "optimizer", "scheduler", "loader"])
    with cells.run_cell():
        for _ in range(recipe.epochs):
            for x, y in loader:
                if zero_first:
                    optimizer.zero_grad()
                loss_of(recipe, model(x.to("cuda")), y.cuda()).backward()
                optimizer.step()
                if recipe.scheduler:
                    scheduler.step()
                if not zero_first:
                    optimizer.zero_grad()
    accelerator.close()
    return weights_of(model)


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a copy of the model's weights, on the host."""
    return {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}


def assert_equal_weights(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], *, atol: float = 1e-6
) -> None:
    """Fail unless the weights agree to ``atol``."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name].to(value.dtype), value, rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )
