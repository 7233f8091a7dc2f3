"""The facade: the names that people who train with PyTorch know, over the parts that do the work."""

from __future__ import annotations

import functools
import gc
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from accel_nb.accelerator.prepare import BatchMeaning, Preparer, describe_object, notes_on
from accel_nb.accelerator.stepper import Stepper
from accel_nb.config import Layer, Resolved, ambient_layers, environment_layer, resolve
from accel_nb.errors import MisuseError
from accel_nb.precision import build_precision
from accel_nb.runtime import rng
from accel_nb.runtime.comm import Communicator, LocalComm, Operation, TorchComm
from accel_nb.runtime.device import choose_precision, has_real_bf16, use
from accel_nb.runtime.environment import option_variables, torchrun_world
from accel_nb.runtime.group import Group
from accel_nb.runtime.nested import map_tensors
from accel_nb.runtime.world import World
from accel_nb.strategies import Registry, Strategy, choose
from accel_nb.telemetry.events import MetricLogged, Prepared, Sink, current_sink
from accel_nb.telemetry.memory import MemoryMeter
from accel_nb.telemetry.meters import StepMeter

T = TypeVar("T")
Function = TypeVar("Function", bound=Callable[..., Any])


class Accelerator:
    """Prepares models, optimizers, schedulers and loaders to train on every device of its world.

    Every rank builds it and makes the same calls. Nothing is shared between accelerators: several may live side by
    side, as long as each has its own objects.
    """

    def __init__(
        self,
        *,
        mixed_precision: Literal["no", "bf16", "fp16", "auto"] | None = None,
        gradient_accumulation_steps: int | None = None,
        cpu: bool = False,
        strategy: str | None = None,
        seed: int | None = None,
        clip: float | None = None,
        batch: BatchMeaning | None = None,
        config: Mapping[str, Any] | None = None,
        comm: Communicator | None = None,
        world: World | None = None,
        sink: Sink | None = None,
        registry: Registry | None = None,
    ) -> None:
        """Resolve the options and enter the world; what is not given comes from the cell's flags, or is a default.

        Args:
            mixed_precision: ``no``, ``bf16``, ``fp16``, or ``auto`` for the best that the device really has.
            gradient_accumulation_steps: Micro-batches for one optimizer step.
            cpu: Train on the CPU although there is an accelerator.
            strategy: A strategy's name, or ``auto``.
            seed: Seed of Python, NumPy and torch; each rank derives a stream of its own.
            clip: Total norm to clip gradients to before each step.
            batch: Whether a loader's batch is each worker's (``per-worker``) or that of all (``global``).
            config: Further options by name, such as ``{"ddp": {"find_unused_parameters": True}}``.
            comm: The communicator of an open world; found from the environment if not given.
            world: This process's place, if neither the environment nor ``comm`` says it.
            sink: Takes the events of training; by default the cell's.
            registry: The strategies to choose from; by default those installed.
        """
        given = {
            "precision": mixed_precision,
            "accumulate": gradient_accumulation_steps,
            "strategy": strategy,
            "seed": seed,
            "clip": clip,
            "batch": batch,
        }
        self._resolved = _resolve({name: value for name, value in given.items() if value is not None}, config)
        options = self._resolved.config
        self._comm, self._group = _enter(comm, world, cpu)
        self._world = self._comm.world
        self._device = use(self._world.device)
        self._sink = current_sink.get() if sink is None else sink
        chosen = choose(options.strategy, self._world, registry or Registry())
        precision = build_precision(options.precision, self._device)
        self._strategy: Strategy = chosen(getattr(options, chosen.name, None), precision)
        self._strategy.open(self._world, self._comm)
        self._stepper = Stepper(
            self._strategy,
            self._world,
            accumulate=options.accumulate,
            clip=options.clip,
            meter=StepMeter(self._world.rank, self._device, self._sink),
            memory=MemoryMeter(self._world.rank, self._device, self._sink),
        )
        self._preparer = Preparer(self, self._stepper, self._comm, self._device)
        self._is_closed = False
        if options.seed is not None:
            rng.set_seed(options.seed, per_rank=self._world)

    # --- who and where ---

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        return self._device

    @property
    def num_processes(self) -> int:
        """How many ranks train together."""
        return self._world.size

    @property
    def process_index(self) -> int:
        """This process's rank."""
        return self._world.rank

    @property
    def local_process_index(self) -> int:
        """This process's rank on its machine."""
        return self._world.local_rank

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self._world.is_main

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first rank of its machine."""
        return self._world.is_local_main

    @property
    def is_last_process(self) -> bool:
        """Whether this is the highest rank."""
        return self._world.is_last

    @property
    def use_distributed(self) -> bool:
        """Whether there is more than one rank."""
        return self._world.size > 1

    # --- what it runs with ---

    @property
    def resolved(self) -> Resolved:
        """The options and where each came from."""
        return self._resolved

    @property
    def mixed_precision(self) -> str:
        """The precision that is really used: never ``auto``."""
        return self._strategy.precision.policy.name

    @property
    def gradient_accumulation_steps(self) -> int:
        """How many micro-batches make one optimizer step; may be set between windows."""
        return self._stepper.window.size

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        if not isinstance(steps, int) or steps < 1:
            raise MisuseError(f"gradient_accumulation_steps is {steps!r}; it is a whole number of at least 1")
        self._stepper.set_accumulation(steps)

    @property
    def sync_gradients(self) -> bool:
        """Whether the current (or latest) micro-batch closes its accumulation window, so that optimizers step."""
        return self._stepper.window.synchronises

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the latest optimizer step was left out because float16 gradients overflowed."""
        return self._stepper.was_skipped

    @property
    def holds_optimizers(self) -> bool:
        """Whether anything that trains has been prepared."""
        return bool(self._stepper.bundle.optimizers)

    @property
    def prepared_objects(self) -> tuple[Any, ...]:
        """Everything that is prepared, in the order in which it came."""
        return tuple(self._preparer.objects)

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._is_closed

    # --- training ---

    def prepare(self, *objects: Any) -> Any:
        """Make models, optimizers, schedulers and loaders work on this world, in place; return the same objects.

        All of them are prepared jointly, so give everything that is trained together in one call. Anything else is
        returned as it is. Every rank must call; rank 0's weights become everyone's.

        An object that another accelerator holds is taken over from it: the newest one has it.
        """
        self._prepare(objects, batch=self._resolved.config.batch or "per-worker", is_training=_always)
        return objects[0] if len(objects) == 1 else objects

    def prepare_model(self, model: nn.Module) -> nn.Module:
        """Prepare one model; see `prepare`."""
        return self.prepare(model)

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Prepare one optimizer; see `prepare`."""
        return self.prepare(optimizer)

    def prepare_scheduler(self, scheduler: torch.optim.lr_scheduler.LRScheduler) -> Any:
        """Prepare one scheduler, whose optimizer is prepared; see `prepare`."""
        return self.prepare(scheduler)

    def prepare_data_loader(self, loader: DataLoader[T]) -> DataLoader[T]:
        """Prepare one loader; see `prepare`."""
        return self.prepare(loader)

    def backward(self, loss: Tensor, *, retain_graph: bool | None = None, create_graph: bool = False) -> None:
        """Compute gradients of the loss: scaled, weighted and averaged over ranks as the run needs.

        Raises `MisuseError` for a loss that is no tensor or has no gradient.
        """
        if retain_graph is None and not create_graph:
            self._stepper.backward(loss)
        else:
            self._stepper.backward(loss, retain_graph=bool(retain_graph), create_graph=create_graph)

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """Return the context of one micro-batch: optimizers step, and gradients are averaged, in each window's last.

        A loader's last batch always closes the window. ``models`` is accepted for familiarity: all that are prepared
        take part.
        """
        return self._stepper.window

    def no_sync(self, model: nn.Module | None = None) -> AbstractContextManager[None]:
        """Return a context in which gradients stay on this rank."""
        return self._stepper.without_sync(self._stepper.bundle.models if model is None else [model])

    def autocast(self) -> AbstractContextManager[Any]:
        """Return a context that computes in the run's precision; prepared models do so by themselves."""
        return self._strategy.precision.autocast()

    def clip_grad_norm_(self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip gradients to a total norm and return the norm before; inside of an open window only measure it."""
        return self._stepper.clip_norm(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
        """Clip each gradient to ``[-clip_value, clip_value]``; does nothing inside of an open window."""
        self._stepper.clip_value(parameters, clip_value)

    def unscale_gradients(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Undo the loss scaling in the gradients, of one optimizer or all, before they are read."""
        for known in self._stepper.bundle.optimizers if optimizer is None else [optimizer]:
            self._strategy.unscale(known)

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        """Give a model its plain class back, in place, and return it; prepare it again to go on training."""
        self._preparer.release([model])
        return model

    def free_memory(self, *objects: Any) -> list[None]:
        """Give objects back as they came (none named: all), and free cached device memory.

        Returns a None for each object, to overwrite the caller's names with.
        """
        self._preparer.release(objects or self._preparer.objects)
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        return [None] * len(objects)

    # --- between ranks ---

    def gather(self, tensor: T) -> T:
        """Return every rank's tensors joined along the first dim, in rank order; first dims may differ.

        Tensors may be nested in tuples, lists, dicts and dataclasses. A scalar becomes a tensor of one value for each
        rank. Every rank must call.
        """
        return map_tensors(self._gather, tensor)

    def gather_for_metrics(self, tensor: T) -> T:
        """Gather what was computed from a prepared loader's batch, without samples that were only filled in."""
        share = self._stepper.window.share
        if share is None:
            return self.gather(tensor)
        keep = share.num_samples
        return map_tensors(lambda part: self._gather(part[:keep] if part.dim() else part), tensor)

    def reduce(self, tensor: T, reduction: Operation = "sum", scale: float = 1.0) -> T:
        """Return the sum, mean, maximum or minimum over ranks, times ``scale``; every rank must call."""

        def reduced(part: Tensor) -> Tensor:
            result = self._comm.all_reduce(part.detach().clone(), reduction)
            return result if scale == 1.0 else result * scale

        return map_tensors(reduced, tensor)

    def broadcast(self, tensor: T, from_process: int = 0) -> T:
        """Return one rank's tensors on every rank; shapes and dtypes must be equal. Every rank must call."""
        return map_tensors(lambda part: self._comm.broadcast(part.detach().clone(), from_process), tensor)

    def pad_across_processes(self, tensor: T, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> T:
        """Return tensors padded along ``dim`` to the longest on any rank; every rank must call."""
        return map_tensors(lambda part: self._pad(part, dim, pad_index, pad_first), tensor)

    def wait_for_everyone(self) -> None:
        """Wait until every rank has come here."""
        self._comm.barrier()

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Run the block on rank 0 before the others: a download that they find done."""
        yield from self._ordered(self.is_main_process)

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """Run the block on each machine's first rank before its others."""
        yield from self._ordered(self.is_local_main_process)

    def on_main_process(self, function: Function) -> Function:
        """Decorate a function to run on rank 0 only; elsewhere it returns None."""
        return _only_if(self.is_main_process, function)

    def on_local_main_process(self, function: Function) -> Function:
        """Decorate a function to run on each machine's first rank only."""
        return _only_if(self.is_local_main_process, function)

    def on_last_process(self, function: Function) -> Function:
        """Decorate a function to run on the last rank only."""
        return _only_if(self.is_last_process, function)

    def on_process(self, function: Callable[..., Any] | None = None, *, process_index: int = 0) -> Any:
        """Decorate a function to run on one rank only."""
        is_here = self.process_index == process_index
        return functools.partial(_only_if, is_here) if function is None else _only_if(is_here, function)

    # --- telling ---

    def print(self, *values: Any, **options: Any) -> None:
        """Print once for each machine."""
        if self.is_local_main_process:
            print(*values, **options)

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Report values by name; reading a tensor waits for its device."""
        at = self._stepper.num_steps if step is None else step
        for name, value in values.items():
            try:
                number = float(value.detach() if isinstance(value, Tensor) else value)
            except (TypeError, ValueError, RuntimeError):
                raise MisuseError(
                    f"log({name!r}) got a {type(value).__name__}; it takes numbers and tensors of one value"
                ) from None
            self._sink.emit(MetricLogged(self._world.rank, at, time.time(), str(name), number))

    def report(self) -> None:
        """Tell the sink what this rank runs with: the receipt."""
        facts = self.describe()
        self._sink.emit(
            Prepared(
                rank=self._world.rank,
                time=time.time(),
                device=facts["device"],
                strategy=facts["strategy"],
                precision=facts["precision"],
                objects=tuple(facts["objects"]),
                notes=tuple(facts["notes"]),
            )
        )

    def diverge_if_sharded(self) -> None:
        """Give a rank above 0 random numbers of its own, derived from the current ones: dropout must not repeat.

        Does nothing as long as no loader is prepared: then every rank trains on the same, and must draw the same. A
        sharded loader keeps to rank 0's order all the same.
        """
        if self._world.rank > 0 and any(isinstance(item, DataLoader) for item in self._preparer.objects):
            rng.set_seed(rng.derive(int(torch.randint(2**62, ())), "rank", self._world.rank))

    def describe(self) -> dict[str, Any]:
        """Return what this rank runs with, as the receipt shows it."""
        preparer = self._preparer
        namespace = self._stepper.namespace or vars(sys.modules["__main__"])
        names = {id(value): name for name, value in namespace.items() if not name.startswith("_")}
        return {
            "rank": self._world.rank,
            "num_processes": self._world.size,
            "device": str(self._device),
            "strategy": self._strategy.name,
            "strategy_options": self._strategy.describe(),
            "precision": self.mixed_precision,
            "accumulate": self.gradient_accumulation_steps,
            "objects": [
                describe_object(item, names.get(id(item)), preparer.batches)
                for item in preparer.objects
                if not isinstance(item, nn.Module) or any(True for _ in item.parameters())
            ],
            "notes": self._notes(),
        }

    def close(self) -> None:
        """Give everything back as it came and leave the world; may be called again."""
        if self._is_closed:
            return
        self._stepper.flush()
        self._preparer.release(self._preparer.objects)
        self._strategy.close()
        if self._group is not None:
            self._group.close()
        self._is_closed = True

    def __repr__(self) -> str:
        place = f"rank {self._world.rank} of {self._world.size} on {self._device}"
        return f"Accelerator({place}, strategy={self._strategy.name!r}, mixed_precision={self.mixed_precision!r})"

    # --- inner workings ---

    def _prepare(self, objects: Sequence[Any], *, batch: BatchMeaning, is_training: Callable[[], bool]) -> list[Any]:
        """Prepare and report; returns what was new."""
        if self._is_closed:
            raise MisuseError("this Accelerator is closed; build a new one")
        before = set(map(id, self._preparer.objects))
        self._stepper.keeps_sums = batch == "global" and self._world.size > 1
        self._preparer.prepare(objects, batch=batch, is_training=is_training)
        new = [item for item in self._preparer.objects if id(item) not in before]
        if any(isinstance(item, DataLoader) for item in new):
            self.diverge_if_sharded()
        if new:
            self.report()
        return new

    def _notes(self) -> list[str]:
        notes = notes_on(self._preparer.objects, self._world.size, self._device)
        if self.gradient_accumulation_steps > 1:
            notes.append(f"accumulate {self.gradient_accumulation_steps} batches for one step")
        if self._resolved.config.clip is not None:
            notes.append(f"clip {self._resolved.config.clip:g}")
        wanted = self._resolved.config.precision
        if wanted == "auto":
            notes.append(f"precision auto is {choose_precision(wanted, self._device)} on this device")
        if self.mixed_precision == "bf16" and not has_real_bf16(self._device):
            notes.append("bf16 is emulated on this device, and slow: fp16 is faster")
        return notes

    def _gather(self, tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        if self._world.size == 1:
            return tensor.reshape(1) if tensor.dim() == 0 else tensor
        if tensor.dim() == 0:
            return torch.stack(self._comm.all_gather(tensor))
        lengths = self._lengths(tensor, 0)
        if min(lengths) == max(lengths):
            return torch.cat(self._comm.all_gather(tensor))
        parts = self._comm.all_gather(_padded(tensor, 0, max(lengths), 0, pad_first=False))
        return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])

    def _pad(self, tensor: Tensor, dim: int, value: float, pad_first: bool) -> Tensor:
        if not -tensor.dim() <= dim < tensor.dim():
            return tensor
        return _padded(tensor, dim, max(self._lengths(tensor, dim)), value, pad_first=pad_first)

    def _lengths(self, tensor: Tensor, dim: int) -> list[int]:
        length = torch.tensor([tensor.shape[dim]], device=tensor.device)
        return [int(part) for part in self._comm.all_gather(length)]

    def _ordered(self, goes_first: bool) -> Iterator[None]:
        if not goes_first:
            self._comm.barrier()
        try:
            yield
        finally:
            if goes_first:
                self._comm.barrier()


def _resolve(given: dict[str, Any], config: Mapping[str, Any] | None) -> Resolved:
    layers = list(ambient_layers()) or [environment_layer(option_variables())]
    if config:
        layers.append(Layer("code", dict(config), "Accelerator(config=...)"))
    if given:
        layers.append(Layer("code", given, "Accelerator(...)"))
    return resolve(layers)


def _enter(comm: Communicator | None, world: World | None, cpu: bool) -> tuple[Communicator, Group | None]:
    """Find the world to train in; the group is returned if it was opened here, and so must be closed."""
    if comm is not None:
        return comm, None
    if world is None:
        world = _find_world(cpu)
    if world.size == 1:
        return LocalComm(world), None
    is_open = Group.is_open()
    group = Group.adopt(world) if is_open else Group.from_environment(world)
    return TorchComm(world, group), None if is_open else group


def _find_world(cpu: bool) -> World:
    """Return the world of the environment, of an open group, or of this process alone."""
    world = torchrun_world()
    if Group.is_open():
        return Group.world_of_open() if world is None else world
    has_gpu = torch.cuda.is_available() and not cpu
    if world is None:
        return World(device="cuda:0" if has_gpu else "cpu")
    return replace(world, device=f"cuda:{world.local_rank}" if has_gpu else "cpu")


def _padded(tensor: Tensor, dim: int, length: int, value: float, *, pad_first: bool) -> Tensor:
    missing = length - tensor.shape[dim]
    if missing == 0:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    filler = tensor.new_full(shape, value)
    return torch.cat([filler, tensor] if pad_first else [tensor, filler], dim)


def _only_if(is_here: bool, function: Any) -> Any:
    # Does not refer to the accelerator: a decorated function must not keep one alive.
    @functools.wraps(function)
    def here_only(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if is_here else None

    return here_only


def _always() -> bool:
    return True
