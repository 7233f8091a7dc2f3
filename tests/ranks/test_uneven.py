"""Ranks whose data ends at different times, and ranks that step by themselves: equal to what one process computes."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accel_nb import DataLoaderConfiguration, DistributedDataParallelKwargs, LocalSGD
from accel_nb.accelerator import Accelerator
from accel_nb.accelerator.training.run_control import TrainingStopped
from accel_nb.errors import MisuseError
from accel_nb.runtime.world import World
from tests.ranks.launch import run_ranks

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.05),
}


def parts(optimizer: str = "sgd") -> tuple[Any, Any, Any]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    made = OPTIMIZERS[optimizer](model.parameters())
    return model, made, torch.optim.lr_scheduler.MultiStepLR(made, [2, 4], 0.5)


def batch(rank: int, number: int, samples: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + number)
    return (
        torch.randn(samples, 4, generator=generator, dtype=torch.float64),
        torch.randn(samples, 2, generator=generator, dtype=torch.float64),
    )


def loss_of(model: nn.Module, rank: int, number: int) -> torch.Tensor:
    x, y = batch(rank, number)
    return nn.functional.mse_loss(model(x), y)


def weights_of(model: nn.Module) -> list[float]:
    return torch.cat([value.detach().flatten() for value in model.state_dict().values()]).tolist()


def state_of(optimizer: torch.optim.Optimizer) -> list[float]:
    return [
        number
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
        for number in value.flatten().tolist()
    ]


def steps_of(counts: list[int], accumulate: int) -> list[list[tuple[int, int]]]:
    """Return the (rank, number) of the batches of each step: whole windows, and what ranks that ended left over."""
    return [
        [
            (rank, number)
            for rank, count in enumerate(counts)
            for number in range(step * accumulate, min((step + 1) * accumulate, count))
        ]
        for step in range(max(counts) // accumulate)
    ]


def by_hand(counts: list[int], optimizer: str, accumulate: int, clip: float | None, epochs: int) -> list[float]:
    model, made, scheduler = parts(optimizer)
    for _ in range(epochs):
        for members in steps_of(counts, accumulate):
            made.zero_grad()
            (sum(loss_of(model, rank, number) for rank, number in members) / len(members)).backward()  # type: ignore[union-attr]
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            made.step()
            scheduler.step()
    return weights_of(model)


def joins(
    world: World, counts: list[int], optimizer: str, accumulate: int, clip: float | None, epochs: int
) -> tuple[list[float], list[float], list[float]]:
    model, made, scheduler = parts(optimizer)
    accelerator = Accelerator(world=world, gradient_accumulation_steps=accumulate, cpu=True)
    accelerator.prepare(model, made, scheduler)
    for _ in range(epochs):
        with accelerator.join_uneven_inputs([model]):
            for number in range(counts[world.rank]):
                with accelerator.accumulate(model):
                    accelerator.backward(loss_of(model, world.rank, number))
                    if clip is not None:
                        accelerator.clip_grad_norm_(model.parameters(), clip)
                    made.step()
                    scheduler.step()
                    made.zero_grad()
    accelerator.wait_for_everyone()
    accelerator.close()
    return weights_of(model), state_of(made), scheduler.get_last_lr()


SETTINGS = list(itertools.product(OPTIMIZERS, (1, 2), (None, 0.2)))
"""Optimizers, how many batches are accumulated, and where gradients are clipped."""


def joins_in_each_setting(world: World, counts: list[int]) -> list[Any]:
    return [joins(world, counts, *setting, 2) for setting in SETTINGS]


@pytest.mark.parametrize("counts", [[5, 3], [0, 4], [2, 2], [1, 5, 3]])
def test_uneven_ranks_train_as_one_process_with_the_batches_of_each_step(counts: list[int]) -> None:
    per_rank = run_ranks(joins_in_each_setting, len(counts), counts)
    for number, setting in enumerate(SETTINGS):
        expected = torch.tensor(by_hand(counts, *setting, 2))
        for found in per_rank:
            weights, *_ = found[number]
            torch.testing.assert_close(
                torch.tensor(weights),
                expected,
                rtol=0,
                atol=1e-6,
                msg=lambda text, setting=setting: f"{setting}: {text}",
            )
            assert found[number] == per_rank[0][number], setting


def reads_in_blocks(world: World, is_on: bool, num_workers: int) -> tuple[list[list[int]], list[float], list[float]]:
    """Return this rank's samples in five epochs: one for each value of even_batches in a block, then one without."""
    torch.manual_seed(1)
    model = nn.Linear(1, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = DataLoaderConfiguration(even_batches=is_on)
    accelerator = Accelerator(world=world, cpu=True, dataloader_config=options, batch="per-worker")
    data = torch.arange(5, dtype=torch.float64).unsqueeze(1)
    loader = DataLoader(data, batch_size=2, num_workers=num_workers)  # type: ignore[arg-type]
    accelerator.prepare(model, optimizer, loader)
    epochs = []

    def train() -> None:
        epochs.append([])
        for batch in loader:
            epochs[-1] += [int(value) for value in batch.flatten()]
            accelerator.backward((model(batch) - 1).square().mean())
            optimizer.step()
            optimizer.zero_grad()

    with accelerator.join_uneven_inputs([model], even_batches=True):
        train()
        gathered = accelerator.gather(torch.tensor(epochs[0])).tolist()
    for value in (None, False):
        with accelerator.join_uneven_inputs([model], even_batches=value):
            train()
    train()
    accelerator.close()
    return epochs, gathered, weights_of(model)


@pytest.mark.parametrize(("is_on", "num_workers"), [(False, 0), (False, 1), (True, 0)])
def test_a_block_may_override_whether_prepared_loaders_repeat_samples(is_on: bool, num_workers: int) -> None:
    even, exact = [[0, 1, 4, 0], [2, 3, 1, 2]], [[0, 1, 4], [2, 3, 4]]  # the last one is a filler, which has no weight
    results = run_ranks(reads_in_blocks, 2, is_on, num_workers)
    default = even if is_on else exact
    for rank, (epochs, gathered, weights) in enumerate(results):
        assert epochs == [even[rank], default[rank], exact[rank], default[rank]]
        assert gathered == [*even[0], *even[1]]
        assert weights == results[0][2]
    torch.manual_seed(1)
    model = nn.Linear(1, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    in_order = {True: [[0, 1, 2, 3], [4, 0, 1, 2]], False: [[0, 1, 2, 3], [4]]}
    for repeats in (True, is_on, False, is_on):
        for samples in in_order[repeats]:
            x = torch.tensor(samples, dtype=torch.float64).unsqueeze(1)
            optimizer.zero_grad()
            (model(x) - 1).square().mean().backward()
            optimizer.step()
    torch.testing.assert_close(torch.tensor(results[0][2]), torch.tensor(weights_of(model)))


def two_optimizers(world: World) -> list[float]:
    torch.manual_seed(0)
    first, second = nn.Linear(2, 2).double(), nn.Linear(2, 1).double()
    steppers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (first, second)]
    accelerator = Accelerator(world=world, cpu=True)
    accelerator.prepare(first, second, *steppers)
    with accelerator.join_uneven_inputs():
        for number in range(1 + 2 * world.rank):
            x = torch.full((1, 2), 1.0 + number + world.rank, dtype=torch.float64)
            accelerator.backward(second(first(x)).square().sum())
            for optimizer in steppers:
                optimizer.step()
                optimizer.zero_grad()
    accelerator.close()
    return weights_of(first) + weights_of(second)


def test_two_optimizers_are_both_joined() -> None:
    torch.manual_seed(0)
    first, second = nn.Linear(2, 2).double(), nn.Linear(2, 1).double()
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    for number in range(3):
        ranks = (0, 1) if number < 1 else (1,)
        xs = [torch.full((1, 2), 1.0 + number + rank, dtype=torch.float64) for rank in ranks]
        optimizer.zero_grad()
        (sum(second(first(x)).square().sum() for x in xs) / len(xs)).backward()  # type: ignore[union-attr]
        optimizer.step()
    found = run_ranks(two_optimizers, 2)
    assert found[0] == found[1]
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(weights_of(first) + weights_of(second)))


def misuses_join(world: World) -> list[str]:
    accelerator = Accelerator(world=world, cpu=True)
    said = []
    model, optimizer, _ = parts()
    with pytest.raises(MisuseError, match="prepare the model"), accelerator.join_uneven_inputs():
        pass
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    accelerator.prepare(model, optimizer, plateau)
    with pytest.raises(MisuseError, match="even_batches is 1"):
        accelerator.join_uneven_inputs([model], even_batches=1)  # type: ignore[arg-type]
    for call in (
        lambda: accelerator.gather(torch.ones(1)),
        accelerator.wait_for_everyone,
        lambda: accelerator.gather_object(1),
        accelerator.check_trigger,
        lambda: plateau.step(1.0),
        lambda: accelerator.save_state("unused"),
        accelerator.main_process_first().__enter__ if world.rank else accelerator.wait_for_everyone,
    ):
        with pytest.raises(MisuseError, match="after the block"), accelerator.join_uneven_inputs([model]):
            call()
    with pytest.raises(ZeroDivisionError), accelerator.join_uneven_inputs():
        _ = 1 / 0
    said.append(str(accelerator.gather(torch.tensor(world.rank)).tolist()))
    return said


def test_collectives_of_the_user_are_refused_inside_of_the_block() -> None:
    assert run_ranks(misuses_join, 2) == [["[0, 1]"]] * 2


def saves_after_a_join(world: World, folder: str) -> list[str]:
    model, optimizer, _ = parts()
    accelerator = Accelerator(world=world, cpu=True, config={"checkpoint": {"dir": folder, "every": 2}})
    data = DataLoader(batch(0, 0, 8)[0], batch_size=1)  # type: ignore[arg-type]
    accelerator.prepare(model, optimizer, data)

    def train(x: torch.Tensor) -> None:
        accelerator.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    with accelerator.join_uneven_inputs():
        for number in range(3 - 2 * world.rank):
            train(batch(world.rank, number)[0])
    saved = [accelerator.save_state()]
    for x in data:
        train(x)
    saved += accelerator.end_run()
    accelerator.close()
    return [line.partition(" in ")[0].replace(folder, "") for line in saved]


def test_ranks_count_the_same_steps_after_a_block_and_save_together(tmp_path: Path) -> None:
    expected = ["/step_3", "saved step 3, 3, 5, 7 (4)"]  # by the call, and by the interval
    assert run_ranks(saves_after_a_join, 2, str(tmp_path)) == [expected] * 2


def local_steps_with_an_error(world: World, folder: str) -> list[list[float]]:
    """Return the weights after an error in a block, after a loop began, a save in a block, and a stop in a block."""
    model, optimizer, _ = parts()
    accelerator = Accelerator(world=world, cpu=True)
    loader = DataLoader(batch(0, 0, 2)[0])  # type: ignore[arg-type]
    accelerator.prepare(model, optimizer, loader)
    found = []

    def train(number: int, error: type[BaseException] | None = None) -> None:
        accelerator.backward(loss_of(model, world.rank, number))
        optimizer.step()
        optimizer.zero_grad()
        if error is not None:
            raise error

    with pytest.raises(ZeroDivisionError), LocalSGD(accelerator, model, 10):
        train(0, ZeroDivisionError)
    found.append(weights_of(model))
    with pytest.raises(MisuseError, match="an error has ended a LocalSGD block"):
        train(1)
    next(iter(loader))
    found.append(weights_of(model))
    train(1)
    with LocalSGD(accelerator, model, 10):
        train(2)
        with pytest.warns(UserWarning, match="weights of one worker") if world.is_main else nullcontext():
            accelerator.get_state_dict(model)
            accelerator.save_model(model, folder + "_model")
        accelerator.save_state(folder)
        accelerator.get_state_dict(model)
        found.append(weights_of(model))
    with pytest.raises(TrainingStopped), LocalSGD(accelerator, model, 10):
        train(3, TrainingStopped)
    found.append(weights_of(model))
    with pytest.raises(ZeroDivisionError), LocalSGD(accelerator, model, 10):
        train(4, ZeroDivisionError)
    accelerator.load_state(folder)
    train(4)
    found.append(weights_of(model))
    accelerator.close()
    return found


def test_weights_of_a_block_that_an_error_ends_are_averaged_where_all_ranks_come_next(tmp_path: Path) -> None:
    first, second = run_ranks(local_steps_with_an_error, 2, str(tmp_path / "step"))
    assert first[0] != second[0]
    assert first[1] == pytest.approx(((torch.tensor(first[0]) + torch.tensor(second[0])) / 2).tolist(), abs=1e-6)
    assert first[1:] == second[1:]


def local_steps(world: World, period: int, optimizer: str, steps: int, more: int) -> tuple[list[float], list[float]]:
    model, made, _ = parts(optimizer)
    accelerator = Accelerator(world=world, cpu=True)
    accelerator.prepare(model, made)

    def train(number: int) -> None:
        accelerator.backward(loss_of(model, world.rank, number))
        made.step()
        made.zero_grad()

    with LocalSGD(accelerator, model, period) as local:
        for number in range(steps):
            train(number)
            local.step()
    for number in range(steps, steps + more):
        train(number)
    accelerator.close()
    return weights_of(model), state_of(made)


@pytest.mark.parametrize("size", [2, 3])
def test_averaging_after_each_step_is_averaging_gradients(size: int) -> None:
    expected = torch.tensor(by_hand_local(size, 1, "sgd", 4))
    first, *others = run_ranks(local_steps, size, 1, "sgd", 4, 2)
    assert all(other == first for other in others)
    for weights, _ in run_ranks(local_steps, size, 1, "sgd", 4, 0):
        torch.testing.assert_close(torch.tensor(weights), expected)
    plain = by_hand_mean(size, "sgd", 4)
    torch.testing.assert_close(expected, torch.tensor(plain))


def by_hand_mean(size: int, optimizer: str, steps: int) -> list[float]:
    model, made, _ = parts(optimizer)
    for number in range(steps):
        made.zero_grad()
        (sum(loss_of(model, rank, number) for rank in range(size)) / size).backward()  # type: ignore[union-attr]
        made.step()
    return weights_of(model)


def by_hand_local(size: int, period: int, optimizer: str, steps: int) -> list[float]:
    """Train ``size`` models apart and average their weights every ``period`` steps and at the end."""
    ranks = [parts(optimizer)[:2] for _ in range(size)]
    for number in range(steps):
        for rank, (model, made) in enumerate(ranks):
            made.zero_grad()
            loss_of(model, rank, number).backward()
            made.step()
        if (number + 1) % period == 0 or number + 1 == steps:
            with torch.no_grad():
                for values in zip(*(model.parameters() for model, _ in ranks), strict=True):
                    mean = torch.stack(list(values)).mean(0)
                    for value in values:
                        value.copy_(mean)
    return weights_of(ranks[0][0])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_local_steps_are_averaged_every_few_and_at_the_end(optimizer: str) -> None:
    expected = torch.tensor(by_hand_local(2, 3, optimizer, 5))
    for weights, state in (results := run_ranks(local_steps, 2, 3, optimizer, 5, 0)):
        torch.testing.assert_close(torch.tensor(weights), expected)
        assert state == results[0][1]
    # and ranks stay equal when gradients are averaged again
    first, second = run_ranks(local_steps, 2, 3, optimizer, 5, 2)
    assert first == second


def misuses_local_sgd(world: World) -> bool:
    model, optimizer, _ = parts()
    accelerator = Accelerator(world=world, cpu=True)
    with pytest.raises(MisuseError, match="not prepared"):
        LocalSGD(accelerator, model, 2)
    accelerator.prepare(model, optimizer)
    for wrong in (0, 1.5, True):
        with pytest.raises(MisuseError, match="at least 1"):
            LocalSGD(accelerator, model, wrong)  # type: ignore[arg-type]
    half = Accelerator(world=world, cpu=True, mixed_precision="fp16")
    half.prepare(model, optimizer)
    with pytest.raises(MisuseError, match="bf16"):
        LocalSGD(half, model, 2)
    with LocalSGD(half, model, 2, enabled=False) as local:
        local.step()
    return True


def test_local_sgd_is_refused_where_it_cannot_work() -> None:
    assert run_ranks(misuses_local_sgd, 2) == [True, True]


def test_one_process_needs_neither() -> None:
    found = joins(World(), [3], "sgd", 1, None, 1)
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(by_hand([3], "sgd", 1, None, 1)))
    alone = local_steps(World(), 2, "sgd", 4, 0)
    torch.testing.assert_close(torch.tensor(alone[0]), torch.tensor(by_hand_mean(1, "sgd", 4)))


# --- losses that are sums ---

TARGETS = torch.tensor([[0, 1, -100], [1, -100, -100], [0, 0, 1], [1, 1, 1], [0, -100, 1]])
"""Targets of five samples; -100 is ignored."""


def summed(kind: str, logits: torch.Tensor, targets: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Return a loss of the way ``kind`` to compute a sum, where ``total`` is the number of targets of all ranks."""
    if kind == "masked":
        mask = targets != -100
        losses = nn.functional.cross_entropy(logits.flatten(0, 1), targets.clamp(min=0).flatten(), reduction="none")
        return (losses * mask.flatten()).sum() / total
    if kind == "in parts":
        parts = [summed("tensor", logits[:, at : at + 1], targets[:, at : at + 1], total) for at in range(3)]
        return parts[0] + parts[1] + parts[2]
    found = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    if kind == "number":
        return found * 1.0 / total.item()
    if kind == "beside a mean":
        return found / total + 0.0 * logits.mean()
    return found if kind == "not divided" else found / total


def gradient_of_sum(model: nn.Module, kind: str, x: torch.Tensor, targets: torch.Tensor) -> list[float]:
    model.zero_grad()
    logits = model(x).unflatten(1, (3, 2))
    total = (targets != -100).sum() if kind != "not divided" else torch.tensor(1)
    summed(kind, logits, targets, total).backward()
    return [
        number for value in model.parameters() if value.grad is not None for number in value.grad.flatten().tolist()
    ]


def parts_of_sums() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(2)
    return nn.Linear(4, 6).double(), torch.randn(5, 4, dtype=torch.float64)


def gradients_of_shares(world: World, kinds: list[str], is_own: bool) -> list[list[float]]:
    accelerator = Accelerator(world=world, cpu=True)
    found = []
    for kind in kinds:
        model, x = parts_of_sums()
        loader: Any = DataLoader(list(zip(x, TARGETS, strict=True)), 5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for samples, targets in loader:
            logits = model(samples).unflatten(1, (3, 2))
            own = (targets != -100).sum()
            total = own if is_own else accelerator.gather(own.reshape(1)).sum()
            accelerator.backward(summed(kind, logits, targets, total) * (1 if is_own else world.size))
            grads = [value.grad for value in model.parameters() if value.grad is not None]
            found.append([number for value in grads for number in value.flatten().tolist()])
            optimizer.step()
            optimizer.zero_grad()
        accelerator.free_memory()
    accelerator.close()
    return found


def test_a_sum_that_a_program_divides_by_the_total_of_all_ranks_is_not_weighted_again() -> None:
    kinds = ["tensor", "number", "masked", "in parts", "beside a mean", "not divided"]
    model, x = parts_of_sums()
    expected = [gradient_of_sum(model, kind, x, TARGETS) for kind in kinds]
    for found in run_ranks(gradients_of_shares, 2, kinds, False):
        for kind, gradient, wanted in zip(kinds, found, expected, strict=True):
            assert gradient == pytest.approx(wanted), kind


class WithLoss(nn.Module):
    """Computes the loss itself, and returns it beside other outputs, as language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, _ = parts_of_sums()

    def forward(self, x: torch.Tensor, targets: torch.Tensor, total: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.inner(x).unflatten(1, (3, 2))
        return {"logits": logits, "loss": summed("tensor", logits, targets, total)}


def gradient_inside(world: World) -> list[float]:
    options = DistributedDataParallelKwargs(find_unused_parameters=True)
    accelerator = Accelerator(world=world, cpu=True, kwargs_handlers=[options])
    _, x = parts_of_sums()
    model, loader = accelerator.prepare(WithLoss(), DataLoader(list(zip(x, TARGETS, strict=True)), 5))
    for samples, targets in loader:
        total = accelerator.gather((targets != -100).sum().reshape(1)).sum()
        accelerator.backward(model(samples, targets, total)["loss"] * world.size)
    grads = [value.grad for value in model.parameters() if value.grad is not None]
    accelerator.close()
    return [number for value in grads for number in value.flatten().tolist()]


def test_a_sum_that_a_model_returns_is_recognized_where_unused_parameters_are_looked_for() -> None:
    model, x = parts_of_sums()
    expected = gradient_of_sum(model, "tensor", x, TARGETS)
    assert run_ranks(gradient_inside, 2) == [pytest.approx(expected)] * 2


def warnings_of_compiled(world: World, total_inside: bool) -> list[str]:
    accelerator = Accelerator(world=world, cpu=True)
    _, x = parts_of_sums()
    model, loader = accelerator.prepare(WithLoss(), DataLoader(list(zip(x, TARGETS, strict=True)), 5))
    computed = torch.compile(model, backend="aot_eager") if total_inside else model
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            for samples, targets in loader:
                accelerator.backward(computed(samples, targets, torch.tensor(7))["loss"])
    accelerator.close()
    return [str(item.message) for item in caught if "compiled function" in str(item.message)]


@pytest.mark.nightly
def test_a_loss_of_a_compiled_model_is_reported_once_where_the_ranks_share_a_batch_unevenly() -> None:
    main, other = run_ranks(warnings_of_compiled, 2, True)
    assert len(main) == 1
    assert "weighted by samples" in main[0]
    assert not other
    assert run_ranks(warnings_of_compiled, 2, False) == [[], []]


def test_a_sum_that_is_divided_by_its_own_total_is_a_mean_and_weighted_by_samples() -> None:
    kinds = ["tensor", "number", "masked", "in parts"]
    model, x = parts_of_sums()
    shares = [(slice(0, 3), 3 / 5), (slice(3, 5), 2 / 5)]
    expected = []
    for kind in kinds:
        means = [(gradient_of_sum(model, kind, x[part], TARGETS[part]), weight) for part, weight in shares]
        expected.append(
            [
                sum(weight * number for number, weight in pair)
                for pair in zip(*([(number, weight) for number in numbers] for numbers, weight in means), strict=True)
            ]
        )
    for found in run_ranks(gradients_of_shares, 2, kinds, True):
        for kind, gradient, wanted in zip(kinds, found, expected, strict=True):
            assert gradient == pytest.approx(wanted), kind


class Branches(nn.Module):
    """Uses one of two layers, whichever the caller names, and has a complex buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 2)]).double()
        self.register_buffer("phase", torch.ones(2, dtype=torch.complex128))

    def forward(self, x: torch.Tensor, index: int) -> torch.Tensor:
        return self.layers[index](x)


def local_branches(world: World, orders: list[list[int]]) -> tuple[list[float], list[list[float]], list[complex]]:
    torch.manual_seed(3)
    model = Branches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    accelerator = Accelerator(world=world, cpu=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    with LocalSGD(accelerator, model, 2) as local:
        for index in orders[world.rank]:
            x, _ = batch(world.rank, index)
            accelerator.backward(model(x, index).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            local.step()
        model.phase.fill_(complex(0, world.rank))
    states = [optimizer.state.get(value, {}).get("momentum_buffer") for value in model.parameters()]
    accelerator.close()
    momenta = [[] if state is None else state.flatten().tolist() for state in states]
    return weights_of(model), momenta, model.phase.tolist()


@pytest.mark.parametrize(("orders", "is_kept"), [([[0, 1], [1, 0]], [True, True]), ([[0, 0], [0, 1]], [True, False])])
def test_ranks_that_use_parts_in_another_order_end_with_equal_state(
    orders: list[list[int]], is_kept: list[bool]
) -> None:
    first, second = run_ranks(local_branches, 2, orders)
    assert first == second
    assert [bool(momentum) for momentum in first[1][::2]] == is_kept
    assert first[2] == [0.5j, 0.5j]
