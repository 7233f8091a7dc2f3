"""Plain PyTorch cells: finding what to prepare, and what plain calls mean while such a cell runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from accel_nb.accelerator.core import Accelerator
from accel_nb.accelerator.prepare import Kinds
from accel_nb.errors import UnsyncedGradientError

_MAX_CONTAINER = 64
_FACTORIES = (
    "arange", "as_tensor", "empty", "empty_like", "eye", "full", "full_like", "linspace", "logspace", "ones",
    "ones_like", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "randperm", "tensor",
    "tril_indices", "triu_indices", "zeros", "zeros_like",
)  # fmt: skip


@dataclass(frozen=True)
class Found:
    """What a cell's names hold that can be prepared and is not: root modules only, each object once."""

    modules: tuple[nn.Module, ...] = ()
    optimizers: tuple[Optimizer, ...] = ()
    schedulers: tuple[LRScheduler, ...] = ()
    loaders: tuple[DataLoader[Any], ...] = ()

    @property
    def objects(self) -> tuple[Any, ...]:
        """All of them, in the order to prepare them in."""
        return (*self.modules, *self.optimizers, *self.schedulers, *self.loaders)


def discover(accelerator: Accelerator, namespace: Mapping[str, Any], names: Iterable[str]) -> Found:
    """Find what this accelerator has not prepared behind ``names``.

    Lists, tuples, dicts and the attributes of the notebook's own objects are looked into too. A scheduler brings its
    optimizer.
    """
    prepared = accelerator._preparer
    kinds = Kinds.of(_candidates(namespace[name] for name in names if name in namespace))
    known = set(map(id, kinds.optimizers))
    behind = {id(scheduler.optimizer): scheduler.optimizer for scheduler in kinds.schedulers}
    optimizers = [*kinds.optimizers, *(item for key, item in behind.items() if key not in known)]
    inside = {id(part) for model in kinds.models for part in model.modules() if part is not model}
    return Found(
        modules=tuple(m for m in kinds.models if id(m) not in inside and m not in prepared),
        optimizers=tuple(item for item in optimizers if item not in prepared),
        schedulers=tuple(item for item in kinds.schedulers if item not in prepared),
        loaders=tuple(item for item in kinds.loaders if item not in prepared),
    )


def prepare_namespace(accelerator: Accelerator, namespace: Mapping[str, Any], names: Iterable[str]) -> Found:
    """Prepare what a plain cell's names hold, jointly, and return what was new.

    A loader's batch is that of all workers unless the options say otherwise, and a loader is read whole where nothing
    is trained. Every rank must call, with the same names.
    """
    stepper = accelerator._stepper
    stepper.namespace = namespace
    found = discover(accelerator, namespace, names)

    def is_training() -> bool:
        models = stepper.stepped_models()
        return torch.is_grad_enabled() and (not models or any(model.training for model in models))

    batch = accelerator.resolved.config.batch or "global"
    accelerator._prepare(found.objects, batch=batch, is_training=is_training)
    return found


def release_dropped(accelerator: Accelerator, namespace: Mapping[str, Any]) -> None:
    """Give back what no name of the notebook leads to any more, such as the model of an earlier run of a cell."""
    held = {id(item) for item in _candidates(namespace.values())}
    objects = accelerator._preparer.objects
    held |= {id(item.optimizer) for item in objects if isinstance(item, LRScheduler) and id(item) in held}
    dropped = [item for item in objects if id(item) not in held]
    if dropped:
        accelerator._preparer.release(dropped)


@contextmanager
def plain_torch(accelerator: Accelerator) -> Iterator[None]:
    """While the block runs, plain PyTorch calls mean what the cell's author meant.

    ``loss.backward()`` goes through the accelerator, gradient clipping sees gradients that are ready, and the device
    ``cuda`` is this worker's own. torch is changed for the whole process and put back at the end.
    """
    stepper = accelerator._stepper
    with ExitStack() as stack:
        replace = functools.partial(_replace, stack)
        replace(Tensor, "backward", _backward(accelerator, Tensor.backward))
        clip_norm, clip_value = torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_
        for module in (torch.nn.utils, torch.nn.utils.clip_grad):
            replace(module, "clip_grad_norm_", _clip_norm(accelerator, clip_norm))
            replace(module, "clip_grad_value_", _clip_value(accelerator, clip_value))
        move = _mover(accelerator.device)
        replace(Tensor, "to", _to(Tensor.to, move))
        replace(Tensor, "cuda", _cuda(accelerator.device))
        replace(nn.Module, "to", _to(nn.Module.to, move))
        replace(nn.Module, "cuda", _cuda(accelerator.device))
        for name in _FACTORIES:
            replace(torch, name, _factory(getattr(torch, name), move))
        stack.callback(register_optimizer_step_pre_hook(_refuse_unprepared(accelerator)).remove)
        yield
    stepper.window.take_share(None)


def _refuse_unprepared(accelerator: Accelerator) -> Callable[..., None]:
    """Return a hook that stops an optimizer which nobody prepared from stepping on one worker's share of a batch."""
    stepper = accelerator._stepper

    def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if stepper.window.share is None or id(optimizer) in stepper.gates or stepper.world.size == 1:
            return
        raise UnsyncedGradientError(
            f"this {type(optimizer).__name__} was made where the cell's preparation does not see it, inside of a "
            f"function, and steps on one worker's share of a batch: {stepper.world.size} workers would drift apart. "
            "Bind model and optimizer to names of the cell before the training starts, or call "
            "accelerator.prepare(model, optimizer) where they are made"
        )

    return hook


def _candidates(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, nn.Module | Optimizer | LRScheduler | DataLoader):
            yield value
            continue
        if isinstance(value, list | tuple | dict):
            inside = value.values() if isinstance(value, dict) else value
        elif type(value).__module__ == "__main__":  # a trainer of the notebook's own
            inside = getattr(value, "__dict__", {}).values()
        else:
            continue
        if len(inside) <= _MAX_CONTAINER:
            yield from (item for item in inside if isinstance(item, nn.Module | Optimizer | LRScheduler | DataLoader))


def _replace(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    if name in vars(owner):
        stack.callback(setattr, owner, name, vars(owner)[name])
    else:  # inherited, as Tensor's methods are from its C base
        stack.callback(delattr, owner, name)
    setattr(owner, name, value)


def _backward(accelerator: Accelerator, plain: Callable[..., None]) -> Callable[..., None]:
    stepper = accelerator._stepper

    @functools.wraps(plain)
    def backward(
        self: Tensor,
        gradient: Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        is_plain = gradient is not None or inputs is not None or stepper.is_inside_backward or not stepper.bundle.models
        if is_plain or self.numel() != 1 or not self.requires_grad:  # the last two: torch has its own errors for them
            plain(self, gradient, retain_graph, create_graph, inputs)
        elif retain_graph is None and not create_graph:
            stepper.backward(self)
        else:
            stepper.backward(self, retain_graph=bool(retain_graph), create_graph=create_graph)

    return backward


def _clip_norm(accelerator: Accelerator, plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    stepper = accelerator._stepper

    @functools.wraps(plain)
    def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float = 2.0, *args: Any, **kwargs: Any) -> Tensor:
        clipped = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if not stepper.owns(clipped):
            return plain(clipped, max_norm, norm_type, *args, **kwargs)
        bundle = stepper.finish(clipped)
        if bundle is None:
            return stepper.clip_norm(clipped, max_norm, norm_type)
        for optimizer in bundle.optimizers:
            stepper.strategy.unscale(optimizer)
        return plain(clipped, max_norm, norm_type, *args, **kwargs)

    return clip_grad_norm_


def _clip_value(accelerator: Accelerator, plain: Callable[..., None]) -> Callable[..., None]:
    stepper = accelerator._stepper

    @functools.wraps(plain)
    def clip_grad_value_(parameters: Any, clip_value: float, *args: Any, **kwargs: Any) -> None:
        clipped = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if not stepper.owns(clipped):
            plain(clipped, clip_value, *args, **kwargs)
            return
        bundle = stepper.finish(clipped)
        if bundle is None:
            return
        for optimizer in bundle.optimizers:
            stepper.strategy.unscale(optimizer)
        plain(clipped, clip_value, *args, **kwargs)

    return clip_grad_value_


def _mover(device: torch.device) -> Callable[[Any], Any]:
    """Return a function that turns what names a CUDA device into the worker's own device."""

    def move(wanted: Any) -> Any:
        kind = type(wanted)
        if kind is str:
            return device if wanted.startswith("cuda") else wanted
        if kind is torch.device:
            return device if wanted.type == "cuda" else wanted
        return device if kind is int else wanted

    return move


def _to(plain: Callable[..., Any], move: Callable[[Any], Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args:
            return plain(self, move(args[0]), *args[1:], **kwargs)
        if kwargs.get("device") is not None:
            kwargs["device"] = move(kwargs["device"])
        return plain(self, **kwargs)

    return to


def _cuda(own: torch.device) -> Callable[..., Any]:
    def cuda(self: Any, device: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        """Return this on the worker's own device, whichever CUDA device was named."""
        return self.to(own) if isinstance(self, nn.Module) else self.to(own, non_blocking=non_blocking, **kwargs)

    return cuda


def _factory(plain: Callable[..., Any], move: Callable[[Any], Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def factory(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = move(kwargs["device"])
        return plain(*args, **kwargs)

    return factory
