"""The seam between the accelerator and a way of training on many devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from accel_nb.precision.policy import Precision
from accel_nb.runtime.devices.device import use
from accel_nb.runtime.distributed.communicator import Communicator
from accel_nb.runtime.distributed.sharded import local
from accel_nb.runtime.world import World

StepOutcome = Literal["ran", "skipped"]


def _use_device_of(world: World) -> torch.device:
    return use(world.device)


def _nothing() -> None:
    return None


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a strategy can do; the accelerator asks these, never a name or a type.

    ``rank`` orders the strategies that fit a world when the user leaves the choice open: the highest is taken.
    ``native_step`` says that `Strategy.step` does more than the precision does: without it and without loss scaling
    the optimizer's own step is called. ``keeps_local`` says that `Strategy.keep_local` is served. ``places_batches``
    says that batches get to the device by `Strategy.place`, and not by being moved there as they are. ``open_device``
    makes a world's device this process's current one and returns it. ``problem`` says what the machine lacks, if
    anything, and what to do about it.
    """

    min_world: int = 1
    max_world: int | None = None
    rank: int = 0
    device_types: frozenset[str] = frozenset({"cpu", "cuda"})
    shards_params: bool = False
    native_precision: bool = False
    native_step: bool = False
    keeps_local: bool = True
    hides_gradients: bool = False
    steps_in: torch.dtype | None = None
    places_batches: bool = False
    open_device: Callable[[World], torch.device] = _use_device_of
    problem: Callable[[], str | None] = _nothing

    def fits(self, world: World) -> bool:
        """Whether the strategy can run in this world."""
        return self.reason_against(world) is None

    def reason_against(self, world: World) -> str | None:
        """Say why the strategy cannot run in this world; None if it can."""
        if world.size < self.min_world:
            return f"it needs at least {self.min_world} workers, and there is {world.size}"
        if self.max_world is not None and world.size > self.max_world:
            return f"it serves at most {self.max_world} worker, and there are {world.size}"
        kind = torch.device(world.device).type
        if kind not in self.device_types:
            return f"it runs on {', '.join(sorted(self.device_types))}, not on {kind}"
        return self.problem()


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a strategy cannot train some models, and what to do instead."""

    why: str
    instead: str

    def __str__(self) -> str:
        return f"{self.why}: {self.instead}"


@dataclass(frozen=True)
class Bundle:
    """What is trained together: handed to a strategy as one, since some must see all of it."""

    models: tuple[nn.Module, ...] = ()
    optimizers: tuple[Optimizer, ...] = ()
    schedulers: tuple[LRScheduler, ...] = ()

    def __add__(self, other: Bundle) -> Bundle:
        return Bundle(
            self.models + other.models, self.optimizers + other.optimizers, self.schedulers + other.schedulers
        )

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield every trainable parameter of the models, once."""
        seen: set[int] = set()
        for model in self.models:
            for parameter in model.parameters():
                if parameter.requires_grad and id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield parameter


class Strategy(Protocol):
    """Built as ``cls(options, precision)``, where ``options`` is the strategy's section of the configuration.

    Every rank makes the same calls in the same order. Only `wrap`, `backward`, `clip_grad_norm`, `step`, `read_state`
    and `write_state` may wait for other ranks.
    """

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities]
    precision: Precision

    def __init__(self, options: Any, precision: Precision) -> None:
        """Keep the options; touch no device and no other rank."""
        ...

    def refusal(self, bundle: Bundle) -> Refusal | None:
        """Say why a bundle cannot be prepared, beside what is prepared already; None where it can.

        One rank may ask alone, also of a strategy that was not opened.
        """
        ...

    def open(self, world: World, comm: Communicator) -> None:
        """Enter a world; before anything else but `refusal`."""
        ...

    def model_init(self) -> AbstractContextManager[Any]:
        """Return the context in which models that are too large for one device are built."""
        ...

    def wrap(self, bundle: Bundle) -> Bundle:
        """Prepare models, optimizers and schedulers jointly, in place, and return the same objects.

        Where it fails on a rank, `unwrap` leaves each model of the bundle there as it was, without other ranks.
        """
        ...

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Undo `wrap` for one model, in place; does nothing to a model that is not wrapped."""
        ...

    def data_coords(self) -> tuple[int, int]:
        """Return which share of the data this rank reads, and how many shares there are."""
        ...

    def place(self, batch: Any) -> Any:
        """Return a batch as the model takes it; called only where ``capabilities.places_batches`` is set."""
        ...

    def grad_sync(self, model: nn.Module, enabled: bool) -> None:
        """Say whether gradients of the next forward and backward passes are to be averaged over ranks."""
        ...

    def keep_local(self, model: nn.Module, enabled: bool) -> None:
        """Leave the model's gradients on each rank, in backward passes and before steps, until told otherwise."""
        ...

    def backward(
        self, loss: Tensor, bundle: Bundle, *, retain_graph: bool | None = None, create_graph: bool = False
    ) -> None:
        """Compute gradients of ``loss``, averaged over ranks unless `grad_sync` said otherwise."""
        ...

    def finish_gradients(self, bundle: Bundle, factor: float | Tensor) -> None:
        """Before clipping and stepping: average what is not averaged yet, and multiply by ``factor``."""
        ...

    def drop_gradients(self, bundle: Bundle) -> None:
        """Forget the gradients of the bundle's optimizers, and what waits to be averaged into them."""
        ...

    def unscale(self, optimizer: Optimizer) -> None:
        """Make the gradients of an optimizer readable, where the precision scales losses."""
        ...

    def clip_grad_norm(
        self, bundle: Bundle, max_norm: float, norm_type: float, parameters: Iterable[Tensor] | None = None
    ) -> Tensor:
        """Clip the gradients of ``parameters`` (none given: of the bundle's) jointly, and return their norm before."""
        ...

    def clip_grad_value(self, bundle: Bundle, clip_value: float, parameters: Iterable[Tensor]) -> None:
        """Clip each element of the gradients of ``parameters``, which the bundle's optimizers step."""
        ...

    def step(self, optimizer: Optimizer) -> StepOutcome:
        """Step the optimizer, or skip the step because gradients overflowed."""
        ...

    def read_state(self, bundle: Bundle, *, copied: bool = True) -> dict[str, Any]:
        """Return all training state, as a copy or as it is in memory; every rank calls.

        A tensor of which this rank holds a part is a `Slice` of it.
        """
        ...

    def write_state(self, bundle: Bundle, state: Mapping[str, Any]) -> None:
        """Put the state of `read_state` back; every rank calls.

        Where ``capabilities.shards_params`` is set, tensors may be handles of a checkpoint that are not read yet.
        """
        ...

    def hidden_bytes(self) -> tuple[int, int]:
        """Return what gradients, and what optimizers, take on this rank beside what their objects show."""
        ...

    def describe(self) -> dict[str, Any]:
        """Return what the receipt shows: plain values."""
        ...

    def close(self) -> None:
        """Unwrap everything and leave the world."""
        ...


class Stepping:
    """The part that strategies share which leave scaling and stepping to the precision."""

    def __init__(self, options: Any, precision: Precision) -> None:
        self.options = options
        self.precision = precision

    def refusal(self, bundle: Bundle) -> Refusal | None:
        """Refuse nothing."""
        return None

    def hidden_bytes(self) -> tuple[int, int]:
        """Return nothing: parameters have their gradients, and optimizers their state."""
        return 0, 0

    def place(self, batch: Any) -> Any:
        """Return the batch: whoever reads it has moved it."""
        return batch

    def drop_gradients(self, bundle: Bundle) -> None:
        """Forget gradients, although an accumulation window may hold them back."""
        for optimizer in bundle.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide the optimizer's gradients by the loss scale, once for each step."""
        self.precision.unscale_(optimizer)

    def clip_grad_value(self, bundle: Bundle, clip_value: float, parameters: Iterable[Tensor]) -> None:
        """Clip each element of a gradient, once it is readable."""
        for optimizer in bundle.optimizers:
            self.unscale(optimizer)
        torch.nn.utils.clip_grad.clip_grad_value_(parameters, clip_value)

    def step(self, optimizer: Optimizer) -> StepOutcome:
        """Step the optimizer unless its gradients overflowed."""
        return "ran" if self.precision.step(optimizer) else "skipped"


class ReplicaStrategy(Stepping):
    """The part that strategies share whose every rank holds the whole model: clipping and state."""

    def refusal(self, bundle: Bundle) -> Refusal | None:
        """Refuse models that have no values: nothing here fills them."""
        for model in bundle.models:
            name = next((name for name, value in model.named_parameters() if value.is_meta), None)
            if name is not None:
                return Refusal(
                    f"{name} of the {type(model).__name__} has no values (it is on the meta device)",
                    "load its weights before preparing it, or divide it by --strategy fsdp with fsdp.weights, or "
                    "deepspeed with deepspeed.weights",
                )
        return None

    def clip_grad_norm(
        self, bundle: Bundle, max_norm: float, norm_type: float, parameters: Iterable[Tensor] | None = None
    ) -> Tensor:
        """Clip to ``max_norm`` and return the norm before clipping."""
        for optimizer in bundle.optimizers:
            self.precision.unscale_(optimizer)
        clipped = list(bundle.parameters()) if parameters is None else list(parameters)
        return torch.nn.utils.clip_grad.clip_grad_norm_(clipped, max_norm, norm_type)

    def read_state(self, bundle: Bundle, *, copied: bool = True) -> dict[str, Any]:
        """Return every state dict, as a copy or as it is in memory."""
        take = copied_state if copied else _as_it_is
        return {
            "models": [take(model.state_dict()) for model in bundle.models],
            "optimizers": [take(optimizer.state_dict()) for optimizer in bundle.optimizers],
            "schedulers": [take(scheduler.state_dict()) for scheduler in bundle.schedulers],
            "precision": self.precision.state_dict(),
        }

    def write_state(self, bundle: Bundle, state: Mapping[str, Any]) -> None:
        """Load every state dict back."""
        for model, values in zip(bundle.models, state["models"], strict=True):
            model.load_state_dict(values)
        for optimizer, values in zip(bundle.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(copied_state(values))
        for scheduler, values in zip(bundle.schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(copied_state(values))
        self.precision.load_state_dict(state["precision"])


def multiply_gradients(bundle: Bundle, factor: float | Tensor) -> None:
    """Multiply every gradient of the bundle's optimizers by ``factor``, in place; reads no number from a device."""
    if not isinstance(factor, Tensor) and factor == 1.0:
        return
    gradients = {
        id(parameter): local(parameter.grad)
        for optimizer in bundle.optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    }
    multiply(gradients.values(), factor)


def multiply(tensors: Iterable[Tensor], factor: float | Tensor) -> None:
    """Multiply tensors in place, those of one dtype and device by one call; reads no number from a device."""
    alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        alike.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for (dtype, device), found in alike.items():
        own = factor.to(device, dtype) if isinstance(factor, Tensor) else factor
        torch._foreach_mul_(found, own)  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]


def _as_it_is(state: Any) -> Any:
    return state


def copied_state(state: Any) -> Any:
    """Return a state with a copy of each tensor."""
    if isinstance(state, Tensor):
        return state.detach().clone()
    if isinstance(state, dict):
        return {key: copied_state(value) for key, value in cast("dict[Any, Any]", state).items()}
    if isinstance(state, list):
        return [copied_state(value) for value in cast("list[Any]", state)]
    return state
