"""Losses of plain cells on several ranks: each trains as on one device, or a warning says that it may not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

from accel_nb.accelerator import Accelerator
from accel_nb.accelerator.plain_cells.autoprepare import PlainCells
from accel_nb.runtime.world import World
from tests.ranks.launch import run_ranks

BATCH, CLASSES, TOKENS = 6, 4, 5
CLASS_WEIGHTS = torch.tensor([0.3, 1.0, 2.0, 0.7], dtype=torch.float64)


class Batch:
    """What one loader gives, by name, and the outputs of the model for it."""

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor, label: Tensor, mask: Tensor, tokens: Tensor) -> None:
        self.model, self.x, self.y, self.label, self.mask = model, x, y, label, mask
        self.token_labels = tokens
        self.sequence = x[:, None, :] * torch.linspace(0.5, 1.5, TOKENS, dtype=x.dtype)[:, None]

    @property
    def out(self) -> Tensor:
        return self.model(self.x)


def dice(out: Tensor, target: Tensor) -> Tensor:
    return 1 - (2 * (out.sigmoid() * target).sum() + 1) / (out.sigmoid().sum() + target.sum() + 1)


def pearson(a: Tensor, b: Tensor) -> Tensor:
    a, b = a - a.mean(), b - b.mean()
    return 1 - (a * b).sum() / (a.norm() * b.norm())


def derivative(b: Batch) -> Tensor:
    x = b.x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(b.model(x).sum(), x, create_graph=True)
    return slope.pow(2).mean() + F.mse_loss(b.model(x), b.y)


def only_derivatives(b: Batch) -> Tensor:
    x = b.x.clone().requires_grad_()
    return torch.autograd.grad(b.model(x).sum(), x, create_graph=True)[0].pow(2).mean()


Loss = Callable[[Batch], Tensor]

PROVEN: dict[str, Loss] = {
    "cross entropy": lambda b: F.cross_entropy(b.out, b.label),
    "squared error": lambda b: ((b.out - b.y) ** 2).mean(),
    "several means": lambda b: F.l1_loss(b.out, b.y) + 0.1 * F.smooth_l1_loss(b.out, b.y) + F.huber_loss(b.out, b.y),
    "binary cross entropy": lambda b: F.binary_cross_entropy_with_logits(b.out, (b.y > 0).double()),
    "one-hot targets": lambda b: F.mse_loss(b.out.softmax(1), F.one_hot(b.label, CLASSES).double()),
    "log likelihood by index": lambda b: -b.out.log_softmax(1)[torch.arange(len(b.label)), b.label].mean(),
    "log likelihood by gather": lambda b: -b.out.log_softmax(1).gather(1, b.label[:, None]).squeeze(1).mean(),
    "sum": lambda b: F.mse_loss(b.out, b.y, reduction="sum"),
    "sum over its own samples": lambda b: ((b.out - b.y) ** 2).sum() / b.x.size(0),
    "penalty on weights": lambda b: b.out.pow(2).mean() + 0.01 * sum(p.pow(2).sum() for p in b.model.parameters()),
    "divergence": lambda b: F.kl_div(b.out.log_softmax(1), b.y.softmax(1), reduction="batchmean"),
    "masked mean": lambda b: ((b.out - b.y) ** 2 * b.mask).sum() / b.mask.sum(),
    "focal by sample": lambda b: (lambda ce: (1 - (-ce).exp()) ** 2 * ce)(
        F.cross_entropy(b.out, b.label, reduction="none")
    ).mean(),
    "label smoothing": lambda b: F.cross_entropy(b.out, b.label, label_smoothing=0.1),
    "class weights": lambda b: F.cross_entropy(b.out, b.label, weight=CLASS_WEIGHTS),
    "tokens, some ignored": lambda b: F.cross_entropy(b.model(b.sequence).view(-1, CLASSES), b.token_labels.view(-1)),
    "tokens in the last dim": lambda b: F.cross_entropy(b.model(b.sequence).transpose(1, 2), b.token_labels),
    "triplets": lambda b: F.triplet_margin_loss(b.out, b.y, b.y.flip(1)),
    "cosines": lambda b: (1 - F.cosine_similarity(b.out, b.y)).mean(),
    "loop over time": lambda b: sum(F.mse_loss(b.model(b.sequence[:, i]), b.y) for i in range(TOKENS)) / TOKENS,
    "stacked over time": lambda b: torch.stack([F.mse_loss(b.model(b.sequence[:, i]), b.y) for i in range(3)]).mean(),
    "time first": lambda b: (b.model(b.sequence).permute(1, 0, 2) - b.y).pow(2).mean(),
    "prototypes": lambda b: torch.cdist(b.out, CLASS_WEIGHTS.outer(CLASS_WEIGHTS)).min(1).values.mean(),
    "slope of the model": derivative,
    "nothing but slopes": only_derivatives,
    "scaled": lambda b: F.mse_loss(b.out, b.y) * torch.tensor(128.0, dtype=torch.float64) / 128,
}

UNPROVEN: dict[str, tuple[Loss, str]] = {
    "root of a mean": (lambda b: F.mse_loss(b.out, b.y).sqrt(), "`sqrt` of a mean over the batch"),
    "log of a mean": (lambda b: F.mse_loss(b.out, b.y).log(), "`log` of a mean"),
    "norm": (lambda b: (b.out - b.y).norm(), "of samples with each other"),
    "correlation": (lambda b: pearson(b.out[:, 0], b.y[:, 0]), "of a mean over the batch"),
    "dice": (lambda b: dice(b.out, (b.y > 0).double()), ""),
    "focal of the mean": (lambda b: (lambda ce: (1 - (-ce).exp()) ** 2 * ce)(F.cross_entropy(b.out, b.label)), "exp"),
    "median": (lambda b: (b.out - b.y).abs().median(), "`median` of samples"),
    "hardest samples": (lambda b: F.cross_entropy(b.out, b.label, reduction="none").topk(2)[0].mean(), "`topk`"),
    "targets normalized in the batch": (
        lambda b: -(b.out[:, 0] * ((b.y[:, 0] - b.y[:, 0].mean()) / b.y[:, 0].std())).mean(),
        "a mean over the batch",
    ),
    "weights normalized in the batch": (
        lambda b: ((b.out - b.y).pow(2).mean(1) * (b.y[:, 0].abs() / b.y[:, 0].abs().sum())).sum(),
        "a sum over the batch",
    ),
    "class weights from the batch": (
        lambda b: F.cross_entropy(b.out, b.label, weight=1 / (1 + b.label.bincount(minlength=CLASSES)).double()),
        "`bincount`",
    ),
    "weighted and more": (
        lambda b: F.cross_entropy(b.out, b.label, weight=CLASS_WEIGHTS) + 0.1 * F.mse_loss(b.out, b.y),
        "`add`",
    ),
    "smoothed, some ignored": (
        lambda b: F.cross_entropy(b.model(b.sequence).view(-1, CLASSES), b.token_labels.view(-1), label_smoothing=0.1),
        "`add`",
    ),
    "contrastive": (
        lambda b: F.cross_entropy(F.normalize(b.out) @ F.normalize(b.y).T, torch.arange(len(b.x))),
        "`mm` of samples with each other",
    ),
    "sum and penalty": (
        lambda b: (b.out - b.y).pow(2).sum() + 0.01 * sum(p.pow(2).sum() for p in b.model.parameters()),
        "`add` of a sum over the batch",
    ),
    "a count read as a number": (lambda b: ((b.out - b.y) ** 2 * b.mask).sum() / b.mask.sum().item(), "`div`"),
    "chosen values": (lambda b: F.mse_loss(b.out[b.mask.bool()], b.y[b.mask.bool()]), "`mse_loss`"),
    "variance": (lambda b: F.mse_loss(b.out, b.y) + b.out.var(0).mean(), "`var` of samples with each other"),
    "columns of limited norm": (lambda b: F.mse_loss(b.out.renorm(2, 1, 0.5), b.y), "`renorm` of samples"),
    "samples as filters": (
        lambda b: F.conv1d(b.out[:, None], b.y[:, None]).square().mean(),
        "`convolution` of",
    ),
    "distances of all to all": (lambda b: torch.cdist(b.out, b.out).mean(), "of samples with each other"),
    "wrongly broadcast": (lambda b: ((b.out[:, 0] - b.y[:, :1]) ** 2).mean(), "`sub` of samples with each other"),
}
CLAMPED: Loss = lambda b: ((b.out - b.y) ** 2 * b.mask).sum() / b.mask.sum().clamp(min=1)  # noqa: E731


def parts() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    torch.manual_seed(2)
    x, y = torch.randn(22, 3).double(), torch.randn(22, CLASSES).double()
    label, mask = torch.randint(CLASSES, (22,)), (torch.rand(22, CLASSES) > 0.4).double()
    tokens = torch.randint(CLASSES, (22, TOKENS))
    tokens[torch.rand(22, TOKENS) < 0.3] = -100
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()
    loader = DataLoader(TensorDataset(x, y, label, mask, tokens), batch_size=BATCH)
    return model, torch.optim.SGD(model.parameters(), lr=0.05), loader


def weights(model: nn.Module) -> list[float]:
    return torch.cat([value.detach().flatten() for value in model.parameters()]).tolist()


def trained(loss_of: Loss) -> list[float]:
    model, optimizer, loader = parts()
    for batch in loader:
        optimizer.zero_grad()
        loss = loss_of(Batch(model, *batch))
        loss.backward()
        optimizer.step()
    return weights(model)


def warned(messages: list[warnings.WarningMessage]) -> list[str]:
    return [str(item.message) for item in messages if "proven" in str(item.message)]


def train_each(world: World) -> dict[str, tuple[list[float], list[str]]]:
    losses = PROVEN | {name: loss_of for name, (loss_of, _) in UNPROVEN.items()} | {"clamped": CLAMPED}
    accelerator = Accelerator(world=world, cpu=True, config={"divide": "data"})
    cells = PlainCells(accelerator)
    found = {}
    for name, loss_of in losses.items():
        with cells.run_cell(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            values = trained(loss_of)
        found[name] = values, warned(caught)
    accelerator.close()
    return found


@pytest.fixture(scope="module")
def on_ranks() -> dict[str, tuple[list[float], list[str]]]:
    first, second = run_ranks(train_each, 2, timeout_s=100)
    assert all(not reported for _, reported in second.values()), "one rank says it"
    return first


@pytest.mark.parametrize("name", PROVEN)
def test_a_sum_or_mean_over_samples_is_equal_and_silent(name: str, on_ranks: Any) -> None:
    values, reported = on_ranks[name]
    assert values == pytest.approx(trained(PROVEN[name]), abs=1e-12)
    assert reported == []


@pytest.mark.parametrize("name", UNPROVEN)
def test_any_other_loss_is_said_with_its_operation(name: str, on_ranks: Any) -> None:
    values, reported = on_ranks[name]
    loss_of, words = UNPROVEN[name]
    assert values != pytest.approx(trained(loss_of), abs=1e-6), "the case shows nothing"
    assert len(reported) == 1
    assert words in reported[0]
    assert "--batch per-worker" in reported[0]


def test_a_divisor_that_is_not_a_sum_is_said_where_it_makes_no_difference_yet(on_ranks: Any) -> None:
    _, reported = on_ranks["clamped"]
    assert "`clamp` of a sum over the batch" in reported[0]


def later_loss(world: World) -> list[str]:
    accelerator = Accelerator(world=world, cpu=True, config={"divide": "data"})
    cells = PlainCells(accelerator)
    with cells.run_cell(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, optimizer, loader = parts()
        for number, batch in enumerate(loader):
            b = Batch(model, *batch)
            optimizer.zero_grad()
            loss = F.mse_loss(b.out, b.y)
            (loss.sqrt() if number >= 1 else loss).backward()
            optimizer.step()
    accelerator.close()
    return warned(caught)


def test_a_loss_that_comes_up_later_is_looked_at_too() -> None:
    first, _ = run_ranks(later_loss, 2)
    assert len(first) == 1
    assert "`sqrt` of a mean over the batch" in first[0]


def search(world: World) -> list[str]:
    accelerator = Accelerator(world=world, cpu=True, config={"divide": "data"})
    cells = PlainCells(accelerator)
    with cells.run_cell(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, _, loader = parts()
        for loss_of in (F.mse_loss, lambda out, y: F.mse_loss(out, y).sqrt()):
            model, optimizer, _ = parts()
            for x, y, *_ in loader:
                optimizer.zero_grad()
                (loss_of(model(x), y) * 2).backward()
                optimizer.step()
    accelerator.close()
    return warned(caught)


def test_each_loss_of_a_search_in_one_loop_is_looked_at() -> None:
    first, _ = run_ranks(search, 2)
    assert len(first) == 1
    assert "`sqrt` of a mean over the batch" in first[0]


def counted(world: World) -> tuple[list[int], list[str]]:
    accelerator = Accelerator(world=world, cpu=True, config={"divide": "data"})
    cells = PlainCells(accelerator)
    totals = []
    with cells.run_cell(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, optimizer, loader = parts()
        for x, y, *_ in loader:
            optimizer.zero_grad()
            with FlopCounterMode(display=False) as counter:
                loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            totals.append(counter.get_total_flops() // len(x))
    accelerator.close()
    return totals, warned(caught)


def test_dispatch_modes_of_the_user_see_what_they_see_without_a_trace() -> None:
    (first, reported), (second, _) = run_ranks(counted, 2)
    assert first[0] == first[1] == second[0] > 0
    assert reported == []


class Noisy(Dataset[Any]):
    """Adds noise to each sample."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((3,), float(index), dtype=torch.float64) + torch.rand(3, dtype=torch.float64)


def draw(world: World, where: str) -> list[str]:
    accelerator = Accelerator(world=world, cpu=True, config={"divide": "data"})
    cells = PlainCells(accelerator)
    with cells.run_cell(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = nn.Linear(3, 3, dtype=torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        quiet: Any = TensorDataset(torch.randn(12, 3, dtype=torch.float64))
        for batch in DataLoader(Noisy() if where == "dataset" else quiet, batch_size=6, shuffle=True):
            x = batch if where == "dataset" else batch[0]
            noise = torch.randn_like(x) if where == "cell" else 0.0
            model(x + noise).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    accelerator.close()
    return [str(item.message) for item in caught if "random numbers" in str(item.message)]


@pytest.mark.parametrize(("where", "num_warnings"), [("cell", 1), ("dataset", 1), ("nowhere", 0)])
def test_random_numbers_drawn_for_a_batch_are_said(where: str, num_warnings: int) -> None:
    first, _ = run_ranks(draw, 2, where)
    assert len(first) == num_warnings


class Centred(nn.Module):
    """Subtracts the mean of the batches so far, or a constant, which both are buffers."""

    def __init__(self, is_moving: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(3, CLASSES, dtype=torch.float64)
        self.is_moving = is_moving
        self.register_buffer("mean", torch.zeros(CLASSES, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x)
        if self.is_moving and self.training:
            self.mean.lerp_(out.detach().mean(0), 0.1)
        return out - self.mean


def with_buffers(world: World, is_moving: bool) -> list[str]:
    accelerator = Accelerator(world=world, cpu=True, config={"divide": "data"})
    cells = PlainCells(accelerator)
    with cells.run_cell(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = Centred(is_moving)
        _, _, loader = parts()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for batch in loader:
            optimizer.zero_grad()
            F.mse_loss(model(batch[0]), batch[1]).backward()
            optimizer.step()
    accelerator.close()
    return [str(item.message) for item in caught if "changes buffers" in str(item.message)]


@pytest.mark.parametrize(("is_moving", "num_warnings"), [(True, 1), (False, 0)])
def test_buffers_that_a_forward_changes_are_said(is_moving: bool, num_warnings: int) -> None:
    first, _ = run_ranks(with_buffers, 2, is_moving)
    assert len(first) == num_warnings


def two_loaders(world: World, num_extra: int) -> list[str]:
    accelerator = Accelerator(world=world, cpu=True, config={"divide": "data"})
    cells = PlainCells(accelerator)
    with warnings.catch_warnings(record=True) as caught, cells.run_cell():
        warnings.simplefilter("always")
        model, optimizer, loader = parts()
        others = DataLoader(TensorDataset(torch.ones(16 + num_extra, 3, dtype=torch.float64)), batch_size=4)
        for batch, (other,) in zip(loader, others, strict=False):
            optimizer.zero_grad()
            (F.mse_loss(model(batch[0]), batch[1]) + model(other).pow(2).mean()).backward()
            optimizer.step()
    accelerator.close()
    return [str(item.message) for item in caught if "divided in different proportions" in str(item.message)]


@pytest.mark.parametrize(("num_extra", "num_warnings"), [(0, 0), (-1, 1)])
def test_loaders_with_other_proportions_in_one_step_are_said(num_extra: int, num_warnings: int) -> None:
    first, _ = run_ranks(two_loaders, 2, num_extra)
    assert len(first) == num_warnings


def skeleton(world: World) -> list[float]:
    accelerator = Accelerator(world=world, cpu=True, config={"divide": "data"})
    cells = PlainCells(accelerator)
    with cells.run_cell():
        model, optimizer, loader = parts()
        empty = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, CLASSES)).to("meta")
        names = {"model": model, "optimizer": optimizer, "empty": empty, "loader": loader}
        cells.prepare(names, list(names))
        for batch in loader:
            optimizer.zero_grad()
            out = torch.func.functional_call(empty, dict(model.named_parameters()), (batch[0],))
            F.mse_loss(out, batch[1]).backward()
            optimizer.step()
    accelerator.close()
    return weights(model)


def test_a_model_without_values_that_is_only_called_is_left_alone() -> None:
    first, _ = run_ranks(skeleton, 2)
    assert first == pytest.approx(trained(lambda b: F.mse_loss(b.out, b.y)), abs=1e-12)


def hooked(world: World, kind: str) -> list[str]:
    accelerator = Accelerator(world=world, cpu=True, config={"divide": "data"})
    cells = PlainCells(accelerator)
    model, optimizer, loader = parts()
    if kind == "parameter":
        next(model.parameters()).register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    with cells.run_cell(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cells.prepare({"model": model, "optimizer": optimizer}, ["model", "optimizer"])
        for batch in loader:
            b = Batch(model, *batch)
            out = b.out
            if kind == "output":
                out.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
            optimizer.zero_grad()
            F.mse_loss(out, b.y).backward()
            optimizer.step()
    accelerator.close()
    return [str(item.message) for item in caught if "hooks on gradients" in str(item.message)]


@pytest.mark.parametrize(("kind", "num_warnings"), [("parameter", 1), ("output", 1), ("none", 0)])
def test_hooks_on_gradients_are_said(kind: str, num_warnings: int) -> None:
    first, _ = run_ranks(hooked, 2, kind)
    assert len(first) == num_warnings
