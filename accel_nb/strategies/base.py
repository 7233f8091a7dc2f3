"""The interface between the accelerator and a strategy, and the parts that strategies share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from accel_nb.precision.policy import Precision
from accel_nb.runtime.devices.registry import device_type
from accel_nb.runtime.distributed.communicator import Communicator
from accel_nb.runtime.distributed.mesh_groups import MeshGroups
from accel_nb.runtime.distributed.sharded import ParameterMemory, local_shard
from accel_nb.runtime.tensors.state_tree import map_state
from accel_nb.runtime.tensors.stepped import stepped_parameters
from accel_nb.runtime.torch_private import is_checked
from accel_nb.runtime.world import World

StepOutcome = Literal["ran", "skipped"]
OnReplaced = Callable[[Mapping[int, Tensor], ParameterMemory], object]
"""Called with the new parameters by the ids of the old ones, and with the memory of the old ones."""


def _use_device_of(world: World) -> torch.device:
    return device_type(world.device).make_current(torch.device(world.device))


def _no_problem() -> None:
    return None


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The features of a strategy. The accelerator reads these fields; it never compares a strategy's name or type.

    ``priority``: ``--strategy auto`` uses the strategy with the highest one, of those that fit the world.
    ``shards_params``: each rank holds shards of the parameters. ``overrides_step``: `Strategy.step` does more than the
    precision's step; otherwise, without loss scaling, the optimizer's own step is called. ``supports_local_gradients``:
    `Strategy.keep_local` is supported. ``divides_layers``: there is a method ``divide_layers`` and an attribute
    ``groups``, as of `LayerDividing`. ``replicates``: ranks hold replicas of the model, so a strategy with
    ``divides_layers`` can replace it if layers are to be divided too. ``holds_gradients``: gradients are held outside
    of ``parameter.grad``, and there are the methods of `GradientHolding`. ``stepped_dtype``: the only dtype of weights
    that can be stepped; None for any. ``places_batches``: batches are moved to the device by `Strategy.place`.
    ``open_device`` makes a world's device the current one of this process and returns it. ``problem`` describes missing
    requirements of this machine and the remedy; None if nothing is missing.
    """

    min_world: int = 1
    max_world: int | None = None
    priority: int = 0
    device_types: frozenset[str] = frozenset({"cpu", "cuda"})
    shards_params: bool = False
    overrides_step: bool = False
    supports_local_gradients: bool = True
    divides_layers: bool = False
    replicates: bool = False
    holds_gradients: bool = False
    stepped_dtype: torch.dtype | None = None
    places_batches: bool = False
    open_device: Callable[[World], torch.device] = _use_device_of
    problem: Callable[[], str | None] = _no_problem

    def fits(self, world: World) -> bool:
        """Return whether the strategy can run in this world."""
        return self.reason_against(world) is None

    def reason_against(self, world: World) -> str | None:
        """Return the reason if the strategy cannot run in this world; None if it can."""
        if world.size < self.min_world:
            return f"it needs at least {self.min_world} workers, and there is {world.size}"
        if self.max_world is not None and world.size > self.max_world:
            return f"it supports at most {self.max_world} worker, and there are {world.size}"
        kind = device_type(world.device)
        if self.device_types.isdisjoint((kind.name, kind.runs_strategies_of)):
            return f"it runs on {', '.join(sorted(self.device_types))}, not on {kind.name}"
        return self.problem()


@dataclass(frozen=True, slots=True)
class Refusal:
    """The reason why a strategy cannot train some models, and the remedy."""

    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.reason}: {self.remedy}"


@dataclass(frozen=True, slots=True)
class Stages:
    """The division of the blocks of models into stages, which ``number`` ranks compute: ``per_rank`` on each."""

    number: int = 1
    per_rank: int = 1
    micro_batches: int = 1
    split_points: tuple[str, ...] = ()


@dataclass(frozen=True)
class Bundle:
    """Models, optimizers and schedulers that are trained together; a strategy gets all of them in one call."""

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
    """Interface of a strategy: how ranks train together. It is built by ``cls(options, precision)``.

    ``options`` is the section of the configuration with the strategy's name; None means the section's defaults. Every
    rank makes the same calls in the same order. Only `wrap`, `backward`, `clip_grad_norm`, `step`, `read_state` and
    `write_state` may wait for other ranks.
    """

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities]
    precision: Precision

    def __init__(self, options: Any, precision: Precision) -> None:
        """Store the options; use no device and no other rank."""
        ...

    def refusal(self, bundle: Bundle) -> Refusal | None:
        """Return the reason if a bundle cannot be prepared in addition to prepared objects; None if it can.

        A single rank may call it, also before `open`.
        """
        ...

    def open(self, world: World, comm: Communicator) -> None:
        """Enter a world; called before everything but `refusal`."""
        ...

    def model_init(self) -> AbstractContextManager[Any]:
        """Return the context in which models that are too large for one device are built."""
        ...

    def wrap(self, bundle: Bundle) -> Bundle:
        """Prepare models, optimizers and schedulers jointly, in place, and return the same objects.

        If it fails on a rank, `unwrap` restores each model of the bundle on that rank; other ranks need not call.
        """
        ...

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Undo `wrap` for one model, in place; does nothing to a model that is not wrapped."""
        ...

    def data_coords(self) -> tuple[int, int]:
        """Return the index of the share of the data that this rank reads, and the number of shares."""
        ...

    def place(self, batch: Any) -> Any:
        """Return a batch on the device; called only where ``capabilities.places_batches`` is set."""
        ...

    def grad_sync(self, model: nn.Module, enabled: bool) -> None:
        """Set whether the next forward and backward passes average gradients over ranks."""
        ...

    def prepare_for_plain_cells(self) -> None:
        """Leave the same gradients as one process after every backward pass, as plain cells need; called before `wrap`.

        Kept gradients are not overwritten, and parameters that are unfrozen later count too. Strategies that always
        average in backward passes do nothing.
        """
        ...

    def set_on_replaced(self, call: OnReplaced) -> None:
        """Call a function after each replacement of parameters of models, and of tensors in states of optimizers.

        Its arguments are the new ones by the ids of the old ones, and the memory of the old ones.
        """
        ...

    def keep_local(self, model: nn.Module, enabled: bool) -> None:
        """Set whether the model's gradients stay on each rank, in backward passes and before steps."""
        ...

    def backward(
        self,
        loss: Tensor,
        bundle: Bundle,
        *,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Sequence[Tensor] | None = None,
    ) -> None:
        """Compute gradients of ``loss``, averaged over ranks unless `grad_sync` switched that off."""
        ...

    def check_graph_can_be_kept(self) -> None:
        """Keep gathered parameters until the next step; called before gradients of gradients are computed."""
        ...

    def is_gathered(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a gathered copy of a parameter, to which only its version counter shows writes."""
        ...

    def finish_gradients(self, bundle: Bundle, factor: float | Tensor) -> None:
        """Average gradients that are not averaged yet, and multiply all by ``factor``.

        Called before clipping and stepping.
        """
        ...

    def drop_gradients(self, bundle: Bundle) -> None:
        """Drop the gradients of the bundle's optimizers, including those not averaged yet."""
        ...

    def unscale(self, optimizer: Optimizer) -> None:
        """Undo loss scaling in the gradients of an optimizer."""
        ...

    def clip_grad_norm(
        self, bundle: Bundle, max_norm: float, norm_type: float, parameters: Iterable[Tensor] | None = None
    ) -> Tensor:
        """Clip the gradients of ``parameters`` (default: the bundle's) to a joint norm; return the norm before."""
        ...

    def clip_grad_value(self, bundle: Bundle, clip_value: float, parameters: Iterable[Tensor]) -> None:
        """Clip each element of the gradients of ``parameters``, which the bundle's optimizers step."""
        ...

    def step(self, optimizer: Optimizer) -> StepOutcome:
        """Step the optimizer, or skip the step because gradients overflowed."""
        ...

    def run_step(self, optimizer: Optimizer, step: Callable[[], Any], *, has_closure: bool) -> Any:
        """Call ``step``, the optimizer's own method, and return its result; called inside of `step` or in its place.

        If it ``has_closure``, ``step`` computes the gradients first, by forward and backward passes.
        """
        ...

    def read_state(self, bundle: Bundle, *, copied: bool = True) -> dict[str, Any]:
        """Return all training state, copied or as it is in memory; every rank calls.

        A tensor of which this rank holds a shard is returned as a `Slice`.
        """
        ...

    def write_state(self, bundle: Bundle, state: Mapping[str, Any]) -> None:
        """Load the state that `read_state` returned; every rank calls.

        Where ``capabilities.shards_params`` is set, tensors may be `StoredTensor`s, which are not read yet.
        """
        ...

    def complete_state(self) -> None:
        """Complete the state before it is read, as by entries that only other ranks have; every rank must call."""
        ...

    def end_interrupted_pass(self) -> None:
        """Restore the state between two passes, after an error in the middle of one; waits for no other rank."""
        ...

    def bytes_outside_of_grad(self) -> tuple[int, int]:
        """Return this rank's bytes of gradients and of optimizer state outside of ``parameter.grad`` and optimizers."""
        ...

    def statistics(self) -> dict[str, float]:
        """Return numbers of the latest step, by name, which the panel draws like the loss."""
        ...

    def describe(self) -> dict[str, Any]:
        """Return descriptive values for the receipt, by name."""
        ...

    def close(self) -> None:
        """Unwrap everything and leave the world."""
        ...


@dataclass(frozen=True)
class ScheduledLoss:
    """The loss of a batch whose gradients were computed by a schedule."""

    loss: Tensor
    """The mean over micro-batches, or their sum."""
    weight_per_row: float
    """The weight of each row of the batch in the mean; 1 if it is equal for all targets."""


class ScheduledSteps(Protocol):
    """Computes the gradients of a model in stages by a schedule of micro-batches."""

    def step(
        self,
        args: Any,
        kwargs: Any,
        target: Any,
        scale: Callable[[], float | Tensor],
        *,
        is_sum: bool,
        holds_on_all_ranks: Callable[[bool], bool],
    ) -> ScheduledLoss | None:
        """Compute the gradients of the loss times ``scale()``, and return the loss of the batch on every rank.

        Returns None, and has computed nothing and not called ``scale``, if a batch cannot be divided into equal
        micro-batches on every rank. Each rank calls ``holds_on_all_ranks`` once, with whether its batch can be.
        """
        ...


class LayerDividing(Protocol):
    """The further methods of a strategy whose ``capabilities.divides_layers`` is set."""

    groups: MeshGroups | None
    """The mesh, after `Strategy.open`, if layers are divided."""

    def divide_layers(self, size: int, *, replicates: bool) -> None:
        """Divide layers among ``size`` ranks; called before `Strategy.open`.

        With ``replicates`` the ranks that read different data hold replicas of the model, and not shards of it.
        """
        ...

    def divide_stages(self, stages: Stages, *, replicates: bool) -> None:
        """Divide the blocks of models into stages; called before `Strategy.open`."""
        ...

    def divide_sequences(self, size: int, *, replicates: bool) -> None:
        """Divide sequences among ``size`` ranks; called before `Strategy.open`."""
        ...

    def divide_experts(self, size: int, *, replicates: bool) -> None:
        """Divide experts among ``size`` ranks that read different data; called before `Strategy.open`."""
        ...

    def training_schedule(
        self,
        model: nn.Module,
        name: Literal["gpipe", "1f1b", "zero_bubble"],
        loss_fn: Callable[..., Tensor],
        total_weight: Callable[[Tensor, int], Tensor | None],
    ) -> ScheduledSteps | None:
        """Return an object that trains a wrapped model by a schedule of micro-batches; None if it has no stages.

        ``total_weight`` returns the total weight of a loss of that many rows, or None if that is the number of rows.
        """
        ...


class GradientHolding(Protocol):
    """The further methods of a strategy whose ``capabilities.holds_gradients`` is set.

    Between cells its gradients are read and replaced by `accel_nb.runtime.distributed.held_gradients`.
    """

    @property
    def has_gradients(self) -> bool:
        """Whether there are gradients."""
        ...

    @property
    def has_incomplete_gradients(self) -> bool:
        """Whether there are gradients that `Strategy.finish_gradients` has not completed."""
        ...

    def read_gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the full gradient of a parameter after `finish_gradients`; changes of it have effect.

        Every rank must call.
        """
        ...

    def write_gradient(self, parameter: nn.Parameter, value: Tensor | None) -> None:
        """Replace the whole gradient of a parameter, or drop it."""
        ...

    def zero_gradients(self, bundle: Bundle) -> None:
        """Set the gradients of the bundle's optimizers to zero."""
        ...

    def apply_gradient_writes(self) -> None:
        """Apply changes that code has made to gradients, before a cell ends; every rank must call."""
        ...


class Stepping:
    """Base of strategies that call the precision for loss scaling and optimizer steps."""

    def __init__(self, options: Any, precision: Precision) -> None:
        self.options = options
        self.precision = precision

    def refusal(self, bundle: Bundle) -> Refusal | None:
        """Refuse nothing."""
        return None

    def complete_state(self) -> None:
        """Do nothing: each rank has the state of its own parameters."""

    def end_interrupted_pass(self) -> None:
        """Do nothing: parameters are the same inside of a pass."""

    def bytes_outside_of_grad(self) -> tuple[int, int]:
        """Return zeros: the objects' own tensors include all gradients and state."""
        return 0, 0

    def statistics(self) -> dict[str, float]:
        """Return nothing."""
        return {}

    def place(self, batch: Any) -> Any:
        """Return the batch, which the loader has moved to the device."""
        return batch

    def prepare_for_plain_cells(self) -> None:
        """Do nothing."""

    def set_on_replaced(self, call: OnReplaced) -> None:
        """Do nothing: models keep their parameters."""

    def check_graph_can_be_kept(self) -> None:
        """Do nothing: the graph references the parameters themselves."""

    def is_gathered(self, tensor: Tensor) -> bool:
        """Return False: passes compute with the parameters themselves."""
        return False

    def drop_gradients(self, bundle: Bundle) -> None:
        """Drop gradients, also of an incomplete accumulation window."""
        for parameter in stepped_parameters(*bundle.optimizers):
            parameter.grad = None

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide the optimizer's gradients by the loss scale, once for each step."""
        self.precision.unscale_(optimizer)

    def clip_grad_value(self, bundle: Bundle, clip_value: float, parameters: Iterable[Tensor]) -> None:
        """Undo loss scaling, and clip each element of a gradient."""
        for optimizer in bundle.optimizers:
            self.unscale(optimizer)
        torch.nn.utils.clip_grad.clip_grad_value_(parameters, clip_value)

    def step(self, optimizer: Optimizer) -> StepOutcome:
        """Step the optimizer unless its gradients overflowed."""
        return "ran" if self.precision.step(optimizer) else "skipped"

    def run_step(self, optimizer: Optimizer, step: Callable[[], Any], *, has_closure: bool) -> Any:
        """Call ``step``."""
        return step()


class ReplicaStrategy(Stepping):
    """Base of strategies in which every rank holds a replica of the model: clipping and state."""

    def refusal(self, bundle: Bundle) -> Refusal | None:
        """Refuse models on the meta device, which have no values."""
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
        """Return every state dict, copied or as it is in memory."""
        read = copy_state if copied else _unchanged
        return {
            "models": [read(model.state_dict()) for model in bundle.models],
            "optimizers": [read(optimizer.state_dict()) for optimizer in bundle.optimizers],
            "schedulers": [read(scheduler.state_dict()) for scheduler in bundle.schedulers],
            "precision": self.precision.state_dict(),
        }

    def write_state(self, bundle: Bundle, state: Mapping[str, Any]) -> None:
        """Load every state dict."""
        for model, values in zip(bundle.models, state["models"], strict=True):
            model.load_state_dict(values)
        for optimizer, values in zip(bundle.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(copy_state(values))
        for scheduler, values in zip(bundle.schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(copy_state(values))
        self.precision.load_state_dict(state["precision"])


def multiply_gradients(bundle: Bundle, factor: float | Tensor) -> None:
    """Multiply every gradient of the bundle's optimizers by ``factor``, in place; no tensor is copied to the host."""
    if not isinstance(factor, Tensor) and factor == 1.0:
        return
    gradients = {
        id(parameter): local_shard(parameter.grad)
        for parameter in stepped_parameters(*bundle.optimizers)
        if parameter.grad is not None
    }
    multiply_tensors(gradients.values(), factor)


def multiply_tensors(tensors: Iterable[Tensor], factor: float | Tensor) -> None:
    """Multiply tensors in place, in one call for each dtype and device; no tensor is copied to the host."""
    has_foreach = is_checked("foreach")
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for (dtype, device), found in groups.items():
        scale = factor.to(device, dtype) if isinstance(factor, Tensor) else factor
        if has_foreach:
            torch._foreach_mul_(found, scale)  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]
        else:
            for tensor in found:
                tensor.mul_(scale)


LOST_WRITE = (
    "{name} is changed by the model's own code in its forward pass, which computes with a copy that was gathered for "
    "it: the change would be lost. Train with --strategy ddp, which holds whole weights"
)
NO_GRAPH = (
    "backward(create_graph=True) would leave gradients that are divided among the workers and have no graph, so a "
    "penalty on them would have no effect: compute gradients of inputs by torch.autograd.grad(loss, inputs, "
    "create_graph=True), or train with `--strategy ddp`, which holds whole weights"
)


def _unchanged(state: Any) -> Any:
    return state


def copy_state(state: Any) -> Any:
    """Return a state with a copy of each tensor."""
    return map_state(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, state)
