"""Checks of the first optimizer step, and a digest of replicas, to detect mistakes early."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from accel_nb.errors import MisuseError
from accel_nb.runtime.distributed.communicator import Communicator
from accel_nb.runtime.distributed.sharded import local_shard
from accel_nb.runtime.process.user_code import warn_at_user_line
from accel_nb.strategies.base import Bundle

_MARGIN = 8.0
_FIRST_UPDATE_STEP = 20
"""The step of an optimizer from which on it must change all parameters with a gradient."""
_NUM_WEIGHTS = 64
_MAX_SAMPLED = 256
_NUM_SAMPLES = 16
_ODD_FACTOR = -7046029254386353131  # 2**64 over the golden ratio, as a signed number
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


_EXPLICIT = (
    "Call accelerator.backward(loss), not loss.backward(), and make the same calls on prepared objects on every rank"
)
_IN_PLAIN_CELL = "Change parameters and gradients on every rank alike, and after loss.backward(), not in hooks"


class FirstStepCheck:
    """Checks a step of one optimizer; costs two passes over its parameters and one message between ranks.

    ``name`` returns a parameter's name. With ``has_replicas`` every rank holds whole copies of the parameters, which
    must be bitwise equal after the step. ``is_plain`` selects the advice in errors, for a plain or an explicit cell.
    With ``refuses_unprepared`` an optimizer of no prepared model is an error, else a warning.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        bundle: Bundle,
        comm: Communicator,
        *,
        has_replicas: bool,
        is_plain: bool,
        refuses_unprepared: bool,
        name: Callable[[Tensor], str | None],
    ) -> None:
        self._optimizer = optimizer
        self._bundle = bundle
        self._comm = comm
        self._has_replicas = has_replicas
        self._is_plain = is_plain
        self._refuses_unprepared = refuses_unprepared
        self._name = name
        self._parameters: list[Tensor] = []
        self._before: Tensor | None = None
        self._is_expected: Tensor | None = None

    @torch.no_grad()
    def record(self) -> None:
        """Record checksums of the parameters, and which must change: their update is large enough for their dtype.

        Raises `MisuseError` for an optimizer of another copy of the model, and, other than in plain cells, for a
        learning rate that the schedule has not set.
        """
        if not self._is_plain:  # as on one device, a plain cell may set the rate of each step itself
            self._check_learning_rate()
        groups = [(group, value) for group in self._optimizer.param_groups for value in group["params"]]
        self._check_owner([value for _, value in groups])
        moving = [(group, value) for group, value in groups if _is_plain(local_shard(value)) and value.grad is not None]
        self._parameters = [value for _, value in moving]
        if not moving:
            return
        self._before = _checksums([local_shard(value) for value in self._parameters])
        self._is_expected = torch.stack([_has_effect(value, group.get("lr", 0.0)) for group, value in moving])

    @torch.no_grad()
    def verify(self, num_steps: int) -> bool:
        """Raise `MisuseError` for a parameter that should have changed and did not, or that differs between ranks.

        Return False if the next step is to be checked too: an optimizer may need several before its first update, as a
        rectified Adam does. ``num_steps`` counts those that it has run.
        """
        if self._before is None or self._is_expected is None:
            return True
        after = _checksums([local_shard(value) for value in self._parameters])
        stuck = ((after == self._before) & self._is_expected.to(after.device)).nonzero().flatten().tolist()
        if self._has_replicas and self._comm.world.size > 1:
            self._compare(after)
        if stuck and num_steps >= _FIRST_UPDATE_STEP:
            raise MisuseError(
                f"step {num_steps} of {type(self._optimizer).__name__} left {self._names(stuck)} unchanged, although "
                "there is a gradient and a learning rate: the optimizer holds other tensors than the model computes "
                "with, or steps in a number format too coarse for the update. Build the optimizer after the model is "
                "complete, or set sentinels to off if this is meant"
            )
        return not stuck

    def _compare(self, checksums: Tensor) -> None:
        """Raise `MisuseError` if a parameter's checksum differs between ranks."""
        rows = torch.stack([row.cpu() for row in self._comm.all_gather(checksums)])
        differs = (rows != rows[0]).any(0).nonzero().flatten().tolist()
        if differs:
            advice = _IN_PLAIN_CELL if self._is_plain else _EXPLICIT
            raise MisuseError(
                f"after the first step the ranks hold different values of {self._names(differs)}, whose sums differ by "
                f"up to {self._largest_difference(differs):.1g}: its gradient was not averaged, or something on one "
                f"rank alone changed it. {advice}; set sentinels to off if replicas are meant to differ, or differ by "
                "rounding, as weights that torch.linalg.lstsq computes on each rank"
            )

    def _largest_difference(self, numbers: list[int]) -> float:
        """Return the largest difference between ranks of the sum of a parameter."""
        sums = torch.stack([local_shard(self._parameters[number]).sum(dtype=torch.float64) for number in numbers])
        rows = torch.stack(self._comm.all_gather(sums))
        return float((rows.max(0).values - rows.min(0).values).max())

    def _check_owner(self, parameters: list[Tensor]) -> None:
        """Raise `MisuseError`, or warn, if an optimizer without gradients has no parameter of a prepared model."""
        known = {id(value) for model in self._bundle.models for value in model.parameters()}
        if known and not any(value.grad is not None or id(value) in known for value in parameters):
            models = ", ".join(type(model).__name__ for model in self._bundle.models)
            problem = (
                f"the {type(self._optimizer).__name__} steps no parameter of a prepared model ({models}), and none of "
                "its parameters has a gradient: it was built for another copy of the model. Build it from the "
                "parameters of the model that is trained"
            )
            if self._refuses_unprepared:
                raise MisuseError(problem)
            warn_at_user_line(problem)

    def _check_learning_rate(self) -> None:
        """Raise `MisuseError` for a learning rate other than the one that the optimizer's schedule has set."""
        schedulers = [item for item in self._bundle.schedulers if item.optimizer is self._optimizer]
        if len(schedulers) != 1:
            return
        for number, (planned, group) in enumerate(
            zip(_planned(schedulers[0]), self._optimizer.param_groups, strict=False)
        ):
            actual = group["lr"]
            if not isinstance(actual, Tensor) and abs(actual - planned) > 1e-9 * max(abs(actual), abs(planned)):
                raise MisuseError(
                    f"group {number} of the {type(self._optimizer).__name__} has the learning rate {actual:g}, and its "
                    f"{type(schedulers[0]).__name__} planned {planned:g}: it was set after the scheduler was made, "
                    "whose steps set rates of their own, or change this one. Set it before making the scheduler, or "
                    "set sentinels to off"
                )

    def _names(self, numbers: list[int]) -> str:
        named = [self._name(self._parameters[number]) or f"parameter {number}" for number in numbers[:3]]
        return ", ".join(named) + (f" and {len(numbers) - 3} more" if len(numbers) > 3 else "")


@torch.no_grad()
def replica_digest(models: Iterable[nn.Module]) -> str:
    """Return a digest of the first values of parameters, which differs among ranks whose replicas have diverged.

    At most 256 parameters are read, evenly spaced over the models.
    """
    values = [value for model in models for value in map(local_shard, model.parameters()) if _is_plain(value)]
    spread = values[:: -(-len(values) // _MAX_SAMPLED) or 1]
    rows = [value[(0,) * (value.dim() - 1)] if value.dim() else value[None] for value in spread]
    samples = [row[:_NUM_SAMPLES].to("cpu", torch.float64).numpy().tobytes() for row in rows]
    return hashlib.sha256(b"".join(samples)).hexdigest()[:16]


def _planned(scheduler: LRScheduler) -> list[Any]:
    """Return the learning rate that a schedule has set for each group.

    None for a schedule that scales the present rate.
    """
    if isinstance(scheduler, ReduceLROnPlateau):
        return []
    rates = getattr(scheduler, "_last_lr", None)
    return [] if rates is None or any(isinstance(rate, Tensor) for rate in rates) else list(rates)


def _is_plain(value: Tensor) -> bool:
    """Return whether the bits of a tensor can be summed: it is a dense tensor of floats, not empty, of no subclass."""
    return (
        type(value) in (Tensor, nn.Parameter)
        and value.layout is torch.strided
        and value.numel() > 0
        and value.is_floating_point()
    )


def _checksums(values: list[Tensor]) -> Tensor:
    """Return a checksum for each tensor."""
    return torch.stack(
        [_checksum(value.contiguous().view(_INTEGERS[value.element_size()]).flatten()) for value in values]
    )


def _checksum(bits: Tensor) -> Tensor:
    """Return a weighted sum of integers; without weights, the equal steps up and down of a first Adam step cancel."""
    places = torch.arange(1, _NUM_WEIGHTS + 1, device=bits.device) * _ODD_FACTOR
    weights = (places ^ (places >> 31)) * _ODD_FACTOR
    num_whole = bits.numel() - bits.numel() % _NUM_WEIGHTS
    columns = bits[:num_whole].view(-1, _NUM_WEIGHTS).sum(0, dtype=torch.int64)
    rest = bits[num_whole:].to(torch.int64)
    return (columns * weights).sum() + (rest * weights[: rest.numel()]).sum()


def _has_effect(value: Tensor, rate: Any) -> Tensor:
    """Return whether a step of plain gradient descent would change even the largest value of a parameter."""
    grad, value = local_shard(value.grad), local_shard(value)
    assert grad is not None, "only parameters with a gradient are checked"
    values = grad.detach() if grad.layout is torch.strided else grad._values()
    if not values.numel():  # a sparse gradient without rows
        return torch.zeros((), dtype=torch.bool, device=value.device)
    largest = values.abs().max().float()
    threshold = _MARGIN * torch.finfo(value.dtype).eps * value.detach().abs().max().float()
    return largest * float(rate) > threshold
