"""The checks. Each runs on every worker and returns a short result, or raises CheckFailed.

Trained weights are compared with those of a plain PyTorch loop over the global batches, on the same device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from accel_nb.accelerator import Accelerator
from accel_nb.accelerator.process.seeding import set_seed
from accel_nb.runtime.world import World

Check = Callable[[World, Callable[[], None]], str]
"""Called with this rank's world, and a function that reports that the rank waits for the interrupt."""

_NUM_SAMPLES = 103  # neither batches nor ranks divide it
_BATCH = 8


class CheckFailed(AssertionError):
    """A check found a wrong value; the message has the found and the expected one."""


def _expect(is_true: bool, message: str) -> None:
    if not is_true:
        raise CheckFailed(message)


def _samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(_NUM_SAMPLES, 6, generator=generator, device="cpu")
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).tanh(), torch.arange(_NUM_SAMPLES, device="cpu"))


def _model(device: torch.device | str = "cpu") -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)).to(device)


def _weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).cpu()


def _train_without_accelerator(
    device: torch.device, batch: int, *, accumulate: int = 1, max_norm: float | None = None
) -> Tensor:
    """Return the weights after one epoch of a plain PyTorch loop over global batches."""
    model = _model(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches = list(DataLoader(_samples(), batch_size=batch))
    for start in range(0, len(batches), accumulate):
        window = batches[start : start + accumulate]
        for inputs, targets, _ in window:
            loss = nn.functional.mse_loss(model(inputs.to(device)), targets.to(device))
            (loss / len(window)).backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return _weights(model)


def _train_prepared(accelerator: Accelerator, batch: int, *, max_norm: float | None = None) -> Tensor:
    """Return the weights after the same epoch with prepared objects."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(_samples(), batch_size=batch)
    accelerator.prepare(model, optimizer, loader)
    for inputs, targets, _ in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
            if max_norm is not None:
                accelerator.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()
    weights = _weights(model)
    accelerator.close()
    return weights


def _compare(found: Tensor, expected: Tensor) -> str:
    largest = float((found - expected).abs().max())
    _expect(largest < 1e-4, f"weights differ from those of one process by up to {largest:.2e}")
    return f"largest difference {largest:.0e}"


def check_world(world: World, report_waiting: Callable[[], None]) -> str:
    """Check that every rank has its own index and device, and that all ranks communicate."""
    accelerator = Accelerator()
    ranks = accelerator.gather(torch.tensor([accelerator.process_index], device=accelerator.device)).tolist()
    _expect(ranks == list(range(world.size)), f"the gathered ranks are {ranks}, of {world.size}")
    mains = accelerator.gather_object(accelerator.is_main_process)
    _expect(sum(mains) == 1, f"{sum(mains)} ranks are main processes")
    return f"{world.size} on {accelerator.device.type}, strategy {accelerator.describe()['strategy']}"


def check_collectives(world: World, report_waiting: Callable[[], None]) -> str:
    """Check gather, reduce, broadcast, scatter and padding, of tensors and objects, with uneven lengths."""
    accelerator, rank, size = Accelerator(), world.rank, world.size
    device = accelerator.device
    own = torch.full((rank + 1,), float(rank), device=device)
    gathered = accelerator.gather({"x": own})["x"].tolist()
    _expect(gathered == [float(at) for at in range(size) for _ in range(at + 1)], f"gather returned {gathered}")
    padded = accelerator.pad_across_processes(own, pad_index=-1)
    _expect(padded.shape == (size,), f"the padded shape is {tuple(padded.shape)}")
    total = accelerator.reduce(torch.tensor([1.0, rank], device=device)).tolist()
    _expect(total == [size, size * (size - 1) / 2], f"the sum over ranks is {total}")
    mean = accelerator.reduce(torch.tensor(float(rank), device=device), "mean").item()
    _expect(mean == (size - 1) / 2, f"the mean over ranks is {mean}")
    sent = accelerator.broadcast(torch.tensor(rank, device=device), size - 1).item()
    _expect(sent == size - 1, f"broadcast from the last rank returned {sent}")
    share = accelerator.scatter(torch.arange(size, device=device) if world.is_main else None).tolist()
    _expect(share == [rank], f"scatter returned {share}")
    objects = accelerator.gather_object([{"rank": rank}])
    _expect(objects == [{"rank": at} for at in range(size)], f"gather_object returned {objects}")
    return "7 operations"


def check_loaders(world: World, report_waiting: Callable[[], None]) -> str:
    """Check that each sample is read once, in the loader's order, with exact, even and dispatched batches."""
    for options in ({}, {"even_batches": True}, {"dispatch_batches": True}):
        accelerator = Accelerator(config={"data": options})
        loader = accelerator.prepare(DataLoader(_samples(), batch_size=_BATCH))
        seen: list[int] = []
        counts: list[int] = []
        for *_, numbers in loader:
            counts.append(len(numbers))
            seen += accelerator.gather_for_metrics(numbers).tolist()
        _expect(seen == list(range(_NUM_SAMPLES)), f"with {options or 'exact shares'} the samples are {seen}")
        steps = accelerator.gather_object(len(counts))
        _expect(len(set(steps)) == 1, f"with {options} the ranks run {steps} steps")
        if options.get("even_batches"):
            shares = accelerator.gather_object(sum(counts))
            _expect(len(set(shares)) == 1, f"even shares are {shares}")
        accelerator.close()
    return f"{_NUM_SAMPLES} samples, 3 ways of reading"


def check_equality(world: World, report_waiting: Callable[[], None]) -> str:
    """Check that training has the same weights as one process that trains with the global batch."""
    accelerator = Accelerator()
    expected = _train_without_accelerator(accelerator.device, _BATCH * world.size)
    return _compare(_train_prepared(accelerator, _BATCH), expected)


def check_global_batches(world: World, report_waiting: Callable[[], None]) -> str:
    """Check the same with a global batch whose size is not divisible by the number of workers."""
    accelerator = Accelerator(split_batches=True)
    return _compare(_train_prepared(accelerator, 7), _train_without_accelerator(accelerator.device, 7))


def check_accumulation(world: World, report_waiting: Callable[[], None]) -> str:
    """Check the same with gradient accumulation, clipping, and a last accumulation window that is shorter."""
    accelerator = Accelerator(gradient_accumulation_steps=3)
    expected = _train_without_accelerator(accelerator.device, _BATCH * world.size, accumulate=3, max_norm=0.1)
    return _compare(_train_prepared(accelerator, _BATCH, max_norm=0.1), expected)


def check_precision(world: World, report_waiting: Callable[[], None]) -> str:
    """Check that bf16 and fp16 training results in float32 weights near those of full precision, equal on all ranks."""
    expected = _train_without_accelerator(Accelerator().device, _BATCH * world.size)
    worst = 0.0
    for precision in ("bf16", "fp16"):
        accelerator = Accelerator(mixed_precision=precision)
        weights = _train_prepared(accelerator, _BATCH)
        worst = max(worst, float((weights - expected).abs().max()))
        _expect(worst < 0.1, f"in {precision} weights are {worst:.2g} away from those of full precision")
        rows = Accelerator().gather(weights[None])
        _expect(bool((rows == rows[0]).all()), f"in {precision} the ranks hold different weights")
    return f"bf16 and fp16, largest difference {worst:.0e}"


def check_schedule(world: World, report_waiting: Callable[[], None]) -> str:
    """Check that a scheduler advances with optimizer steps, not with calls or workers."""
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    accelerator.prepare(model, optimizer, scheduler)
    for _ in range(4):
        with accelerator.accumulate():
            accelerator.backward(model(torch.ones(2, 6, device=accelerator.device)).mean())
            optimizer.step()
            scheduler.step()
    rate = scheduler.get_last_lr()[0]
    accelerator.close()
    _expect(bool(rate == 0.25), f"after 4 batches, so 2 steps, the rate is {rate} and not 0.25")
    return "2 steps of 4 batches"


def check_triggers(world: World, report_waiting: Callable[[], None]) -> str:
    """Check that a trigger that one rank sets is returned once, on all ranks."""
    accelerator = Accelerator()
    if accelerator.is_last_process:
        accelerator.set_trigger()
    seen = [accelerator.check_trigger(), accelerator.check_trigger()]
    _expect(seen == [True, False], f"two calls of check_trigger returned {seen}")
    return "set by the last rank"


def check_random_numbers(world: World, report_waiting: Callable[[], None]) -> str:
    """Check that a seed sets the same random numbers on all ranks, or different ones with ``device_specific``."""
    accelerator = Accelerator()
    draws: list[list[float]] = []
    for is_specific in (False, True):
        set_seed(7, device_specific=is_specific)
        draws.append(accelerator.gather(torch.rand(1, device="cpu").to(accelerator.device)).tolist())
    _expect(len(set(draws[0])) == 1, f"with one seed ranks draw {draws[0]}")
    _expect(len(set(draws[1])) == world.size, f"with device-specific seeds ranks draw {draws[1]}")
    return "common and own streams"


def check_interrupt(world: World, report_waiting: Callable[[], None]) -> str:
    """Wait in a collective that the last rank never reaches, until the kernel interrupts, as its stop button does."""
    accelerator = Accelerator()
    report_waiting()
    if world.size == 1 or not world.is_last:
        while True:
            accelerator.wait_for_everyone()
    threading.Event().wait()
    raise CheckFailed("the wait ended without an interrupt")


CHECKS: Mapping[str, Check] = MappingProxyType(
    {
        "world": check_world,
        "collectives": check_collectives,
        "loaders": check_loaders,
        "equality": check_equality,
        "global batches": check_global_batches,
        "accumulation": check_accumulation,
        "precision": check_precision,
        "schedule": check_schedule,
        "triggers": check_triggers,
        "random numbers": check_random_numbers,
        "interrupt": check_interrupt,
    }
)
"""Every check by its name, in the order in which they run."""
