"""Exchange of tokens among the ranks that hold different experts, as an operation with gradients of any order.

Each rank reads different data. A rank's experts compute tokens of all ranks, so that the gradient of their weights is a
sum over these ranks instead of the average. Gradients are therefore divided by the number of ranks before they reach
the experts, and multiplied by it after that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function


class Exchange(Protocol):
    """The methods of a communicator that `TokenExchange` calls."""

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return every rank's tensor, in rank order; shapes and dtypes must be equal on all ranks."""
        ...

    def all_to_all(self, parts: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """Send one part to each rank, and return the received parts, in rank order."""
        ...


@dataclass(frozen=True, slots=True)
class Route:
    """The numbers of rows that this rank sends to each rank, and receives from each."""

    sent: tuple[int, ...]
    received: tuple[int, ...]

    @property
    def reverse(self) -> Route:
        """The route from the receivers back to the senders."""
        return Route(self.received, self.sent)


class TokenExchange:
    """Exchanges rows among ``size`` ranks; each must make the same calls, also in the backward pass."""

    def __init__(self, comm: Exchange, rank: int, size: int) -> None:
        self.comm = comm
        self.rank = rank
        self.size = size

    def gather_counts(self, counts: Tensor) -> Tensor:
        """Return the ranks' counts as rows of one tensor on the CPU."""
        return torch.stack(self.comm.all_gather(counts)).cpu()

    def send(self, rows: Tensor, route: Route) -> Tensor:
        """Send rows, in the order of the ranks, to the ranks of their experts; return the rows received here."""
        return _Send.apply(rows, self, route, float(self.size))  # pyright: ignore[reportReturnType]

    def send_back(self, rows: Tensor, route: Route) -> Tensor:
        """Send results back for the rows that `send` has returned; ``route`` is the same as in that call."""
        return _Send.apply(rows, self, route.reverse, 1 / self.size)  # pyright: ignore[reportReturnType]

    def exchange(self, rows: Tensor, route: Route) -> Tensor:
        """Exchange rows without gradients."""
        shapes = [(number, *rows.shape[1:]) for number in route.received]
        return torch.cat(self.comm.all_to_all(rows.split(list(route.sent)), shapes))


class _Send(Function):
    """Exchanges rows; gradients are sent back and multiplied by ``factor``."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: TokenExchange, route: Route, factor: float) -> Tensor:
        ctx.arguments = exchange, route, factor
        return exchange.exchange(rows, route)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        exchange, route, factor = ctx.arguments
        back: Any = _Send.apply(gradients[0] * factor, exchange, route.reverse, 1 / factor)
        return back, None, None, None
