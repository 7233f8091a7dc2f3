"""A trial of a division of layers: whether the parts together compute the same as the whole module.

The module is copied in float64 to the CPU with random weights, whole and once for each part; threads take the place of
ranks. So a trial needs no other rank, changes nothing, and cannot leave a rank waiting.
"""

from __future__ import annotations

import copy
import inspect
import io
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from accel_nb.runtime import rng
from accel_nb.runtime.distributed.layer_exchange import LayerExchange
from accel_nb.runtime.tensors.nested import find_tensors
from accel_nb.strategies.tensor_parallel.divided_layers import DividedGroup, LayerDivision, shard_of
from accel_nb.strategies.trials import ThreadCommunicator, TrialFailed, is_close, random_copy, run_threads

_BATCH, _LENGTH = 2, 5
_TOLERANCE = 1e-9


@dataclass
class _Outcome:
    outputs: list[Tensor]
    input_gradient: Tensor
    gradients: dict[str, Tensor | None]


def try_group(owner: nn.Module, group: DividedGroup, width: int, size: int) -> bool:
    """Compute ``owner`` whole and in ``size`` parts, on random numbers; raises `TrialFailed` if results differ.

    Outputs, the gradient of the input and those of all parameters are compared; a part has shards of the gradients of
    divided parameters. Return whether in training a part draws other random numbers than the whole, as for dropout.
    What the module computes in training is compared if it draws none.
    """
    if not _takes_one_argument(owner):
        raise TrialFailed("its forward needs more than one argument, so it cannot be tried")
    own = replace(group, owner="")
    with rng.fork_rng(), redirect_stdout(io.StringIO()):  # what the module's code prints
        rng.set_seed(0)
        data = torch.randn(_BATCH, _LENGTH, width, dtype=torch.float64, device="cpu")
        weights = torch.randn(4096, dtype=torch.float64, device="cpu")
        try:
            whole = random_copy(owner, torch.float64)
        except Exception as error:
            raise TrialFailed(f"it cannot be copied: {type(error).__name__}: {error}") from None
        _compare_parts(whole.eval(), own, data, weights, size)
        if _draws(whole.train(), data):
            return _draws_otherwise(whole, own, data, size)
        _compare_parts(whole, own, data, weights, size)
    return False


def _compare_parts(module: nn.Module, own: DividedGroup, data: Tensor, weights: Tensor, size: int) -> None:
    """Compute a copy of ``module`` whole and in parts; raises `TrialFailed` if results differ."""
    try:
        expected = _run(copy.deepcopy(module), data, weights)
    except Exception as error:
        raise TrialFailed(f"it cannot be tried: {type(error).__name__}: {error}") from None
    outcomes = _run_parts([_part(module, own, index, size) for index in range(size)], own, data, weights)
    dims = dict(own.part_names())
    for index, found in enumerate(outcomes):
        pairs = [*zip(found.outputs, expected.outputs, strict=False), (found.input_gradient, expected.input_gradient)]
        if len(found.outputs) != len(expected.outputs):
            raise TrialFailed("its parts return other values")
        for name, gradient in expected.gradients.items():
            part = found.gradients[name]
            if gradient is None or part is None:
                if gradient is not part:
                    raise TrialFailed(f"{name} gets a gradient in the whole layer only, or in its parts only")
                continue
            if name in dims:
                gradient = shard_of(gradient, dims[name], index, size)
            pairs.append((part, gradient))
        if not all(is_close(result, wanted, _TOLERANCE) for result, wanted in pairs):
            raise TrialFailed("its parts compute something else than the whole")


def _draws(module: nn.Module, data: Tensor) -> bool:
    """Return whether a module draws random numbers."""
    return not torch.equal(torch.get_rng_state(), _state_after(copy.deepcopy(module), data))


def _draws_otherwise(module: nn.Module, group: DividedGroup, data: Tensor, size: int) -> bool:
    """Return whether a part draws other random numbers than the whole: their generators end differently."""
    part = _part(module, group, 0, size)
    LayerDivision(part, [group], LayerExchange(_NoSum()), size)
    return not torch.equal(_state_after(copy.deepcopy(module), data), _state_after(part, data))


def _state_after(module: nn.Module, data: Tensor) -> Tensor:
    """Return the state of the random generator after a call of a module, and restore it."""
    with rng.fork_rng(), torch.no_grad():
        try:
            module(data)
        except Exception as error:
            raise TrialFailed(f"in training it raises {type(error).__name__}: {error}") from None
        return torch.get_rng_state()


def _takes_one_argument(owner: nn.Module) -> bool:
    try:
        inspect.signature(owner.forward).bind(None)
    except TypeError:
        return False
    return True


def _part(module: nn.Module, group: DividedGroup, index: int, size: int) -> nn.Module:
    """Return a copy of a module with shards of the parameters that are divided."""
    named = dict(module.named_parameters())
    shards: dict[int, Any] = {
        id(named[name]): nn.Parameter(shard_of(named[name], dim, index, size))
        for name, dim in group.part_names()
        if name in named
    }
    return copy.deepcopy(module, shards)


def _run(module: nn.Module, data: Tensor, weights: Tensor) -> _Outcome:
    """Return the outputs of a module, and the gradients of a random linear function of them."""
    given = data.clone().requires_grad_()
    with torch.enable_grad():
        outputs = [value for value in find_tensors(module(given)) if value.is_floating_point()]
        total = torch.zeros((), dtype=torch.float64, device="cpu")
        for number, value in enumerate(outputs):
            if value.requires_grad:
                repeats = -(-value.numel() // weights.numel())
                factors = weights.roll(number).repeat(repeats)[: value.numel()].view(value.shape)
                total = total + (value * factors).sum()
        torch.autograd.backward(total)  # `Tensor.backward` is replaced in plain cells
    gradient = torch.zeros_like(given) if given.grad is None else given.grad
    named = {name: value.grad for name, value in module.named_parameters()}
    return _Outcome([value.detach() for value in outputs], gradient, named)


class _NoSum:
    """A communicator that does not reduce, for a run of which only the random numbers are compared."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the tensor."""
        return tensor


def _run_parts(parts: Sequence[nn.Module], group: DividedGroup, data: Tensor, weights: Tensor) -> list[_Outcome]:
    size = len(parts)

    def compute(index: int, comm: ThreadCommunicator) -> _Outcome:
        LayerDivision(parts[index], [group], LayerExchange(comm), size)
        return _run(parts[index], data, weights)

    try:
        return run_threads(size, compute)
    except Exception as error:
        raise TrialFailed(f"its parts raise {type(error).__name__}: {error}") from None
