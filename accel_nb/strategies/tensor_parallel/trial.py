"""A numerical check of a division of layers: whether the parts together compute the same as the whole module.

The module is copied in float64 to the CPU with random weights, whole and once for each part; threads take the place of
ranks. So a trial, as this check is called here, needs no other rank, changes nothing, and cannot leave a rank waiting.
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
from accel_nb.strategies.tensor_parallel.divided_layers import LayerDivision, LayersToDivide, shard_of
from accel_nb.strategies.trials import ThreadCommunicator, TrialFailed, is_close, random_copy, run_threads

_BATCH, _LENGTH = 2, 5
_TOLERANCE = 1e-9


@dataclass
class _Outcome:
    outputs: list[Tensor]
    input_gradient: Tensor
    gradients: dict[str, Tensor | None]


def try_layers(owner: nn.Module, layers: LayersToDivide, width: int, size: int) -> bool:
    """Run the module ``owner`` whole and in ``size`` parts on random numbers; raises `TrialFailed` if results differ.

    ``layers`` are the layers in it that are divided together, and ``width`` is the number of features of its input.

    Outputs, and the gradients of the input and of all parameters, are compared; a part has shards of the gradients of
    divided parameters. Return whether in training a part draws other random numbers than the whole, as for dropout. If
    it draws none, the results in training mode are compared too.
    """
    if not _takes_one_argument(owner):
        raise TrialFailed("its forward needs more than one argument, so it cannot be tried")
    layers = replace(layers, owner="")
    with rng.fork_rng(), redirect_stdout(io.StringIO()):  # the module's code may print
        rng.set_seed(0)
        data = torch.randn(_BATCH, _LENGTH, width, dtype=torch.float64, device="cpu")
        coefficients = torch.randn(4096, dtype=torch.float64, device="cpu")
        try:
            whole = random_copy(owner, torch.float64)
        except Exception as error:
            raise TrialFailed(f"it cannot be copied: {type(error).__name__}: {error}") from None
        _compare_parts(whole.eval(), layers, data, coefficients, size)
        if _uses_rng(whole.train(), data):
            return _part_uses_rng_differently(whole, layers, data, size)
        _compare_parts(whole, layers, data, coefficients, size)
    return False


def _compare_parts(module: nn.Module, layers: LayersToDivide, data: Tensor, coefficients: Tensor, size: int) -> None:
    """Run a copy of ``module`` whole and in parts; raises `TrialFailed` if results differ."""
    try:
        expected = _run(copy.deepcopy(module), data, coefficients)
    except Exception as error:
        raise TrialFailed(f"it cannot be tried: {type(error).__name__}: {error}") from None
    outcomes = _run_parts([_part(module, layers, index, size) for index in range(size)], layers, data, coefficients)
    dims = dict(layers.part_names())
    for index, found in enumerate(outcomes):
        pairs = [*zip(found.outputs, expected.outputs, strict=False), (found.input_gradient, expected.input_gradient)]
        if len(found.outputs) != len(expected.outputs):
            raise TrialFailed("its parts return another number of outputs")
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


def _uses_rng(module: nn.Module, data: Tensor) -> bool:
    """Return whether a module draws random numbers."""
    return not torch.equal(torch.get_rng_state(), _state_after(copy.deepcopy(module), data))


def _part_uses_rng_differently(module: nn.Module, layers: LayersToDivide, data: Tensor, size: int) -> bool:
    """Return whether a part draws other random numbers than the whole: their generators end differently."""
    part = _part(module, layers, 0, size)
    LayerDivision(part, [layers], LayerExchange(_NoSum()), size)
    return not torch.equal(_state_after(copy.deepcopy(module), data), _state_after(part, data))


def _state_after(module: nn.Module, data: Tensor) -> Tensor:
    """Return the state of the random generator after a call of a module; the state before the call is restored."""
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


def _part(module: nn.Module, layers: LayersToDivide, index: int, size: int) -> nn.Module:
    """Return a copy of a module with shards of the parameters that are divided."""
    named = dict(module.named_parameters())
    shards: dict[int, Any] = {
        id(named[name]): nn.Parameter(shard_of(named[name], dim, index, size))
        for name, dim in layers.part_names()
        if name in named
    }
    return copy.deepcopy(module, shards)


def _run(module: nn.Module, data: Tensor, coefficients: Tensor) -> _Outcome:
    """Return the outputs of a module, and the gradients of a linear function of them with these coefficients."""
    given = data.clone().requires_grad_()
    with torch.enable_grad():
        outputs = [value for value in find_tensors(module(given)) if value.is_floating_point()]
        total = torch.zeros((), dtype=torch.float64, device="cpu")
        for number, value in enumerate(outputs):
            if value.requires_grad:
                repeats = -(-value.numel() // coefficients.numel())
                factors = coefficients.roll(number).repeat(repeats)[: value.numel()].view(value.shape)
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


def _run_parts(
    parts: Sequence[nn.Module], layers: LayersToDivide, data: Tensor, coefficients: Tensor
) -> list[_Outcome]:
    size = len(parts)

    def compute(index: int, comm: ThreadCommunicator) -> _Outcome:
        LayerDivision(parts[index], [layers], LayerExchange(comm), size)
        return _run(parts[index], data, coefficients)

    try:
        return run_threads(size, compute)
    except Exception as error:
        raise TrialFailed(f"its parts raise {type(error).__name__}: {error}") from None
