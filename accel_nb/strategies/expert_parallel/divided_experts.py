"""Expert parallelism: each rank holds some of the experts, and computes them for the tokens of all ranks of the group.

A *module of experts* has the number ``num_experts``, parameters whose first dim has this length, and
``forward(tokens, indices, weights)``: tokens of shape [T, D], the K experts of each token and the weights of their
results, both of shape [T, K]. It returns the weighted sum of each token's experts, of shape [T, D]. The experts of
transformers are such modules.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from accel_nb.errors import MisuseError
from accel_nb.runtime.distributed.sharded import shard_with_gradient
from accel_nb.runtime.distributed.token_exchange import Route, TokenExchange
from accel_nb.runtime.tensors.instance_patching import (
    innermost_class,
    replace_forward,
    restore_forward,
    unbound_forward,
)
from accel_nb.strategies.block_calls import LATE_HOOK, CallHooks, inside


class ExpertDivision:
    """Replaced forwards of modules of experts; `undo` restores them."""

    def __init__(self, modules: Sequence[nn.Module], exchange: TokenExchange) -> None:
        self.modules = tuple(modules)
        self._exchange = exchange
        # By module: how many tokens each expert got in the latest call, on the ranks of the exchange.
        self._loads: dict[int, Tensor] = {}
        self._replaced: list[nn.Module] = []
        try:
            for number, module in enumerate(modules):
                record = partial(self._loads.__setitem__, number)
                replace_forward(
                    module, _divided_forward(weakref.ref(module), unbound_forward(module), exchange, record)
                )
                self._replaced.append(module)
        except BaseException:
            self.undo()
            raise

    def describe(self) -> str:
        """Describe the number of experts that a rank holds."""
        counts = sorted({vars(module)["num_experts"] for module in self.modules})
        held = " or ".join(f"{count // self._exchange.size} of {count}" for count in counts)
        return f"{held} on each worker, in {len(self.modules)} module{'s' * (len(self.modules) != 1)}"

    def peak_load(self) -> float:
        """Return the number of tokens of the busiest expert, as a multiple of the mean in its module.

        1 is an even load.
        """
        return max((float(load.max() / load.mean()) for load in self._loads.values()), default=1.0)

    def undo(self) -> None:
        """Restore the forwards; other replacements since then must be undone already."""
        for module in reversed(self._replaced):
            restore_forward(module)
        self._replaced.clear()


def _divided_forward(
    module: Callable[[], Any], forward: Callable[..., Tensor], exchange: TokenExchange, record: Callable[[Tensor], None]
) -> Callable[..., Tensor]:
    signature, hooks = inspect.signature(module().forward), CallHooks(inside(module()))

    def route_tokens(*args: Any, **kwargs: Any) -> Tensor:
        experts = module()
        given = signature.bind(*args, **kwargs).arguments.values()
        if len(given) != 3:
            raise MisuseError(_ARGUMENTS.format(kind=innermost_class(experts).__name__, number=len(given)))
        if hooks.exist():
            raise MisuseError(LATE_HOOK.format(kind=innermost_class(experts).__name__, option="ep"))
        tokens, indices, weights = given
        num_experts, num_own = experts.num_experts, experts.num_experts // exchange.size
        if tokens.dim() != 2 or indices.dim() != 2 or weights.shape != indices.shape:
            shapes = ", ".join(str(list(value.shape)) for value in (tokens, indices, weights))
            raise MisuseError(_SHAPES.format(kind=type(experts).__name__, shapes=shapes))
        wanted = indices.flatten()
        order = wanted.argsort(stable=True)
        own_counts = wanted.bincount(minlength=num_experts)
        if len(own_counts) != num_experts:
            kind = type(experts).__name__
            raise MisuseError(
                f"a {kind} has {num_experts} experts, and got the index {len(own_counts) - 1}; indices go from 0 to "
                f"{num_experts - 1}"
            )
        counts = exchange.gather_counts(own_counts)
        record(counts.sum(0, dtype=torch.float32))
        # By rank that sends, and by rank that holds the experts.
        pairs = counts.view(exchange.size, exchange.size, num_own).sum(2)
        route = Route(tuple(pairs[exchange.rank].tolist()), tuple(pairs[:, exchange.rank].tolist()))
        own_range = slice(exchange.rank * num_own, (exchange.rank + 1) * num_own)
        local = torch.arange(num_own, device="cpu").repeat(exchange.size)
        local = local.repeat_interleave(counts[:, own_range].flatten()).to(indices)
        received = exchange.send(tokens[order // indices.shape[1]], route)
        computed = _compute(experts, forward, received, local, num_own)
        results = exchange.send_back(computed, route)
        unsorted = torch.empty_like(order)
        unsorted[order] = torch.arange(len(order), device=order.device)
        by_token = results[unsorted].view(*indices.shape, results.shape[1])
        return (by_token * weights[..., None]).sum(1).to(results.dtype)

    return route_tokens


def _compute(experts: Any, forward: Callable[..., Tensor], tokens: Tensor, indices: Tensor, num_own: int) -> Tensor:
    """Return the results of this rank's experts, one expert for each row of ``tokens``."""
    number = len(tokens)
    if not number:  # the weights get a gradient of zeros, since the weights on other ranks get a gradient
        tokens, indices = torch.cat([tokens, tokens.new_zeros(1, tokens.shape[1])]), indices.new_zeros(1)
    parameters, attributes = experts._parameters, vars(experts)
    before, whole = dict(parameters), attributes["num_experts"]
    try:
        parameters.update({name: shard_with_gradient(value) for name, value in before.items()})
        attributes["num_experts"] = num_own
        result = forward(experts, tokens, indices[:, None], tokens.new_ones(len(tokens), 1))
    finally:
        attributes["num_experts"] = whole
        parameters.update(before)
    return result[:number]


_ARGUMENTS = (
    "a {kind} whose experts are divided by --ep was called with {number} arguments: it takes tokens, and indices and "
    "weights of experts. Train with --ep 1"
)
_SHAPES = (
    "a {kind} whose experts are divided by --ep was called with tensors of shapes {shapes}: it takes tokens [T, D], "
    "and indices and weights of experts [T, K]"
)
