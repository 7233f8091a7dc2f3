"""One stage of a model for one micro-batch: the model's code runs, but only the blocks of the stage compute."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from accel_nb.errors import MisuseError
from accel_nb.runtime.distributed.stage_exchange import StageExchange, TensorSpec
from accel_nb.strategies.block_calls import chain_input, with_chain_input


@dataclass(frozen=True)
class Stage:
    """A stage of this rank: its number, its blocks, and the ranks of the stages before and after it."""

    number: int
    blocks: range
    previous_rank: int | None
    next_rank: int | None


class StageEndedError(BaseException):
    """Ends the forward pass of a stage; a base exception, so that a model's own code does not handle it."""

    def __init__(self, output: Tensor) -> None:
        super().__init__()
        self.output = output


class StageRun:
    """One forward pass of one stage with one micro-batch; ``receive`` returns the previous stage's output."""

    def __init__(self, stage: Stage, receive: Callable[[], Tensor]) -> None:
        self._stage, self._receive = stage, receive

    def call(self, number: int, compute: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Compute a block of this stage and return its output; for a block of an earlier stage return the input.

        Raise `StageEndedError` after the last block of the stage, unless it is the model's last stage.
        """
        stage = self._stage
        if number not in stage.blocks:
            return chain_input(args, kwargs)
        if number == stage.blocks.start and stage.previous_rank is not None:
            args, kwargs = with_chain_input(args, kwargs, self._receive())
        output = compute(*args, **kwargs)
        if not isinstance(output, Tensor):
            raise MisuseError(
                f"a block returns a {type(output).__name__}, and stages exchange one tensor: train with --pp 1"
            )
        if number == stage.blocks.stop - 1 and stage.next_rank is not None:
            raise StageEndedError(output)
        return output


class StageInput:
    """The tensor that the previous stage sends for one micro-batch; ``spec`` is None until it was received."""

    def __init__(self, exchange: StageExchange, source: int | None, spec: TensorSpec | None) -> None:
        self._exchange, self._source = exchange, source
        self.spec = spec
        self.tensor: Tensor | None = None
        self._is_received = False

    def receive(self) -> Tensor:
        """Return the tensor of the previous stage; raise RuntimeError if that stage has failed."""
        self.receive_unread()
        if self.tensor is None:
            raise RuntimeError("the previous stage has failed")
        return self.tensor

    def receive_unread(self) -> None:
        """Receive the tensor of the previous stage, unless it was received already."""
        if self._is_received or self._source is None:
            return
        self._is_received = True
        if self.spec is None:
            self.spec = self._exchange.receive_spec(self._source)
        if self.spec is not None:
            self.tensor = self._exchange.receive(self.spec, self._source)
            if torch.is_grad_enabled():
                self.tensor.requires_grad_()
