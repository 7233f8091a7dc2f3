"""Measurement of the memory of a training step by running it on tensors with shapes and no data.

The model is copied with fake parameters (`torch._subclasses.FakeTensorMode`): nothing is computed, no device is used,
and the model, its gradients and the random number generators are unchanged.
"""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from accel_nb.errors import MisuseError
from accel_nb.forecast.memory import Activations
from accel_nb.forecast.sizes import ModelSizes, WeightSize
from accel_nb.precision.half import cast_half_floats
from accel_nb.runtime.tensors.nested import find_tensors, map_tensors
from accel_nb.strategies.fsdp.wrap_policy import repeated_blocks

_LOSSES_WITH_STORAGE = frozenset(
    getattr(torch.ops.aten, name).default
    for name in ("mse_loss", "smooth_l1_loss", "binary_cross_entropy", "soft_margin_loss")
)
"""Losses whose kernels store each element's loss in the result and then shrink the result's shape to one number. Its
storage keeps its size as long as the loss exists. Meta kernels do not show this."""

Loss = Callable[[Any, Any], Tensor]
"""Called with the model's output and the batch; returns the scalar that is minimized."""


def measure_model(model: nn.Module, *optimizers: Optimizer, on_gpu: bool = False) -> ModelSizes:
    """Return the sizes of a model and of its optimizers' state, after tracing one step of each.

    ``on_gpu``: the run is on a GPU, where torch's optimizers use kernels over lists of tensors.
    """
    blocks = {id(parameter): name for name, block in repeated_blocks(model).items() for parameter in block.parameters()}
    weights = [
        WeightSize(
            name,
            tuple(parameter.shape),
            parameter.element_size(),
            parameter.requires_grad,
            blocks.get(id(parameter)),
        )
        for name, parameter in model.named_parameters()
    ]
    found = ModelSizes(type(model).__name__, tuple(weights), sum(buffer.nbytes for buffer in model.buffers()))
    for optimizer in optimizers:
        found = _with_state(found, model, optimizer, on_gpu)
    return found


def measure_activations(
    model: nn.Module,
    batch: Any,
    batch_size: int,
    *,
    loss: Loss | None = None,
    half: torch.dtype | None = None,
    checkpoints: bool = False,
    on_gpu: bool = False,
    adapt: Callable[[nn.Module], object] | None = None,
) -> Activations:
    """Return the peak memory of a forward and backward pass over ``batch_size`` samples.

    ``batch`` is one batch of any size, as a loader yields it: a tensor; (inputs, targets); or named inputs. Its first
    dimension is set to ``batch_size``. ``half`` computes in that dtype, under autocast and with a model that was cast.
    ``checkpoints`` recomputes the repeated blocks. With ``on_gpu`` dropout and attention save what GPU kernels save.
    ``adapt`` is called with the copy of the model that is run. Raises `MisuseError` if the model cannot be run without
    values.
    """
    run = _Run(model, batch, batch_size, loss or default_loss, checkpoints, on_gpu, adapt)
    if half is None:
        return Activations(run.peak(None, None)[0])
    kept, copies = run.peak(half, None)
    try:
        cast_bytes = run.peak(None, half)[0]
    except MisuseError:  # it creates fp32 tensors: only autocast mixes dtypes
        cast_bytes = None
    return Activations(kept, copies, cast_bytes)


def default_loss(output: Any, batch: Any) -> Tensor:
    """Return a loss chosen by shapes: the output's own, cross entropy, mean squared error, or the output's sum."""
    own = output.get("loss") if isinstance(output, dict) else None
    if isinstance(own, Tensor):
        return own
    first = _first_tensor(output)
    target: Any = batch[1] if isinstance(batch, tuple | list) and len(batch) > 1 else None
    if isinstance(target, Tensor):
        if target.is_floating_point() and target.shape == first.shape:
            return nn.functional.mse_loss(first, target)
        if target.dtype == torch.int64 and target.shape == first.shape[:-1]:
            return nn.functional.cross_entropy(first.flatten(0, -2), target.flatten())
        if target.dtype == torch.int64 and target.shape == (first.shape[0], *first.shape[2:]):
            return nn.functional.cross_entropy(first, target)
    return first.float().sum()


@dataclass(frozen=True, slots=True)
class _Run:
    """One step of a model, which can be run in several precisions."""

    model: nn.Module
    batch: Any
    batch_size: int
    loss: Loss
    checkpoints: bool
    on_gpu: bool
    adapt: Callable[[nn.Module], object] | None = None

    def peak(self, autocast: torch.dtype | None, cast: torch.dtype | None) -> tuple[int, int]:
        """Return the peak beside weights and gradients, and the bytes that autocast's copies of weights add to it."""
        try:
            with FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad():
                model = _fake_copy(self.model, cast)
                batch = map_tensors(lambda tensor: _resized(tensor, self.batch_size, cast), self.batch)
                if self.checkpoints:
                    for block in repeated_blocks(model).values():
                        _recompute(block, self.kernels)
                if self.adapt is not None:
                    self.adapt(model)
                return self._step(model, batch, autocast)
        except MisuseError:
            raise
        except Exception as error:  # any error of the user's forward
            raise MisuseError(
                f"{type(self.model).__name__} cannot be run on shapes alone: {_first_line(error)}"
            ) from error

    def kernels(self) -> AbstractContextManager[Any]:
        """Return a new context in which operations save the same tensors as on the run's device."""
        return _GpuKernels() if self.on_gpu else nullcontext()

    def _step(self, model: nn.Module, batch: Any, autocast: torch.dtype | None) -> tuple[int, int]:
        context: AbstractContextManager[Any] = (
            torch.autocast("cpu", dtype=autocast) if autocast is not None else nullcontext()
        )
        with self.kernels(), _LiveStorages([*model.parameters(), *model.buffers()]) as live:
            for tensor in find_tensors(batch):
                live.add(tensor)
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(live.exclude_gradient)
            with context:
                output = _call(model, batch)
            loss = self.loss(output if autocast is None else cast_half_floats(output, torch.float32), batch)
            del output
            if loss.requires_grad:
                torch.autograd.backward(loss)  # `Tensor.backward` is replaced in plain cells
            return live.peak, live.peak_with_copies - live.peak


def _call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, dict):
        return model(**batch)
    return model(batch[0]) if isinstance(batch, tuple | list) and batch else model(batch)


def _first_tensor(output: Any) -> Tensor:
    found = next(find_tensors(output), None)
    if found is None:
        raise MisuseError(f"the model returns a {type(output).__name__} without a tensor to take a loss of")
    return found


def _resized(tensor: Tensor, batch_size: int, cast: torch.dtype | None) -> Tensor:
    """Return an empty tensor like ``tensor`` with another first dimension, on the CPU."""
    dtype = cast if cast is not None and tensor.is_floating_point() else tensor.dtype
    shape = (batch_size, *tensor.shape[1:]) if tensor.dim() else ()
    return torch.empty(shape, dtype=dtype, device="cpu")


def _fake_copy(model: nn.Module, cast: torch.dtype | None) -> nn.Module:
    """Return a copy of the model whose parameters and buffers have no data."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        dtype = cast if cast is not None and parameter.is_floating_point() else parameter.dtype
        memo[id(parameter)] = nn.Parameter(
            torch.empty(parameter.shape, dtype=dtype, device="cpu"), requires_grad=parameter.requires_grad
        )
    for buffer in model.buffers():
        dtype = cast if cast is not None and buffer.is_floating_point() else buffer.dtype
        memo[id(buffer)] = torch.empty(buffer.shape, dtype=dtype, device="cpu")
    fake = copy.deepcopy(model, memo)
    return fake if model.training else fake.train()  # the model may be in eval mode; the forecast is of training


def _recompute(block: nn.Module, kernels: Callable[[], AbstractContextManager[Any]]) -> None:
    """Make a block save its inputs only, and recompute the rest in the backward pass with the same kernels."""
    forward = block.forward

    def with_kernels(*args: Any, **kwargs: Any) -> Any:
        with kernels():
            return forward(*args, **kwargs)

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(with_kernels, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    block.forward = recomputed


class _GpuKernels(TorchFunctionMode):
    """Simulates fused GPU kernels: dropout with a mask of bytes, attention that saves no weights."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        functional = nn.functional
        if func in (functional.dropout, functional.multi_head_attention_forward):
            given = inspect.signature(func).bind(*args, **kwargs)
            given.apply_defaults()
            if func is functional.dropout:
                return _dropout(**given.arguments)
            args, kwargs = (), {**given.arguments, "dropout_p": 0.0}
        elif func is functional.scaled_dot_product_attention:  # its fifth argument is the dropout
            args, kwargs = (*args[:4], *([0.0] if len(args) > 4 else []), *args[5:]), kwargs
            kwargs |= {} if len(args) > 4 else {"dropout_p": 0.0}
        return func(*args, **kwargs)


def _dropout(input: Tensor, p: float, training: bool, inplace: bool) -> Tensor:
    return torch.native_dropout(input, p, True)[0] if training and p < 1 else input


class _LiveStorages(TorchDispatchMode):
    """Sums the bytes of storages that operations create, as long as they exist; storages of ``given`` are left out."""

    def __init__(self, given: list[Tensor]) -> None:
        super().__init__()
        self.peak = 0
        # The peak with autocast's copies of weights included.
        self.peak_with_copies = 0
        self._current = 0
        self._copies = 0
        self._given = {_key(tensor) for tensor in given}
        self._sizes: dict[int, int] = {}
        self._copied: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            result = func(*args, **(kwargs or {}))
        except DataDependentOutputException:
            if func is not torch.ops.aten._local_scalar_dense.default:
                raise
            return _placeholder_value(args[0].dtype)  # `item()`, whose value is unknown
        if func in _LOSSES_WITH_STORAGE and not result.dim():
            result = torch.empty_like(args[0]).as_strided((), ())
        is_copy = func is torch.ops.aten._to_copy.default and _key(args[0]) in self._given
        for tensor in find_tensors(result):
            self.add(tensor, is_copy=is_copy)
        return result

    def add(self, tensor: Tensor, *, is_copy: bool = False) -> None:
        """Count a tensor's storage, unless it is counted already."""
        key = _key(tensor)
        if key in self._given or key in self._sizes:
            return
        storage = tensor.untyped_storage()
        size = self._sizes[key] = storage.nbytes()
        weakref.finalize(storage, self._forget, key).atexit = False
        if is_copy:
            self._copied.add(key)
            self._copies += size
        else:
            self._current += size
            self.peak = max(self.peak, self._current)
        self.peak_with_copies = max(self.peak_with_copies, self._current + self._copies)

    def exclude_gradient(self, parameter: Tensor) -> None:
        """Stop counting a parameter's gradient: gradients are counted separately."""
        if parameter.grad is not None:
            self._forget(_key(parameter.grad))

    def _forget(self, key: int) -> None:
        size = self._sizes.pop(key, 0)
        if key in self._copied:
            self._copied.discard(key)
            self._copies -= size
        else:
            self._current -= size


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _placeholder_value(dtype: torch.dtype) -> bool | int | float:
    return True if dtype is torch.bool else 1.0 if dtype.is_floating_point else 1


def _key(tensor: Any) -> int:
    return tensor.untyped_storage()._cdata if isinstance(tensor, Tensor) else 0


def _with_state(found: ModelSizes, model: nn.Module, optimizer: Optimizer, on_gpu: bool) -> ModelSizes:
    """Return the model's sizes with the state of one more optimizer for each weight, and the memory of its step."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        copies = {id(parameter): _fake_like(parameter) for parameter in _optimizer_parameters(optimizer)}
        clone = copy.copy(optimizer)
        clone.__dict__ = {name: value for name, value in vars(optimizer).items() if name != "step"}
        clone.state = type(optimizer.state)(optimizer.state.default_factory)
        clone.param_groups = [
            {
                **group,
                "params": [copies[id(parameter)] for parameter in group["params"]],
                **({"foreach": True} if on_gpu and _chooses_foreach(group) else {}),
            }
            for group in optimizer.param_groups
        ]
        try:
            with _LiveStorages(
                [*copies.values(), *(copied.grad for copied in copies.values() if copied.grad is not None)]
            ) as live:
                for parameter in _optimizer_parameters(optimizer):  # some optimizers make their state at construction
                    if (state := optimizer.state.get(parameter)) is not None:
                        clone.state[copies[id(parameter)]] = {key: _fake_state(value) for key, value in state.items()}
                type(optimizer).step(clone)
                kept = {
                    key: sum(map(_nbytes, find_tensors(clone.state.get(copied, {})))) for key, copied in copies.items()
                }
                peak = live.peak
        except Exception as error:  # a step that needs a closure, or values
            raise MisuseError(
                f"{type(optimizer).__name__}.step() cannot be run on shapes alone: {_first_line(error)}"
            ) from error
    own = [kept.get(id(parameter), 0) for parameter in model.parameters()]
    weights = [
        replace(weight, state_bytes=weight.state_bytes + more) for weight, more in zip(found.weights, own, strict=True)
    ]
    names = [*([] if found.optimizer == "none" else found.optimizer.split(" and ")), type(optimizer).__name__]
    return replace(
        found,
        weights=tuple(weights),
        optimizer=" and ".join(dict.fromkeys(names)),
        step_bytes=max(found.step_bytes, peak - sum(own)),  # optimizers step one after the other
    )


def _optimizer_parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _fake_like(parameter: Tensor) -> Tensor:
    empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
    fake = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    if parameter.requires_grad:
        fake.grad = torch.empty_like(fake)
    return fake


def _fake_state(value: Any) -> Any:
    """Return a value of an optimizer's state without its data; steps may read single numbers, such as their count."""
    if not isinstance(value, Tensor):
        return value
    if value.dim() == 0:
        return torch.tensor(1, dtype=value.dtype, device="cpu")
    return torch.empty(value.shape, dtype=value.dtype, device="cpu")


def _chooses_foreach(group: dict[str, Any]) -> bool:
    return group.get("foreach", False) is None and not group.get("fused")


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
