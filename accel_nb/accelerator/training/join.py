"""Ranks that run out of data at different times: those that have ended take part in the steps of the others.

Inside of the block nothing is averaged during backward. Before each step ranks exchange who steps which optimizer and
after how many micro-batches; then the sums of their gradients are added up and divided by the number of micro-batches
behind them. A rank that has ended adds what was left of its last accumulation window, and zeros from then on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from accel_nb.accelerator.training.stepper import Stepper
from accel_nb.errors import MisuseError
from accel_nb.runtime.distributed.collectives import Collectives, all_reduce_together
from accel_nb.runtime.distributed.communicator import Communicator
from accel_nb.runtime.distributed.gradients import filled_gradients
from accel_nb.runtime.process import serialization
from accel_nb.runtime.tensors.stepped import stepped_parameters
from accel_nb.strategies.base import Bundle, multiply

_REFUSAL = "inside of join_uneven_inputs other ranks may have ended and would not answer; call it after the block"


@contextmanager
def joined(stepper: Stepper, comm: Communicator, collectives: Collectives) -> Iterator[None]:
    """See `Accelerator.join_uneven_inputs`."""
    if comm.world.size == 1:
        yield
        return
    if not stepper.bundle.optimizers:
        raise MisuseError("join_uneven_inputs has nothing to join: prepare the model and its optimizer first")
    run = _JointRun(stepper, comm)
    strategy, models = stepper.strategy, stepper.bundle.models
    stepper.keep_local(models, True)
    stepper.finish_gradients, stepper.is_joined = run.finish, True
    collectives.refusal = _REFUSAL
    try:
        yield
        run.shadow()
    finally:
        collectives.refusal = None
        stepper.finish_gradients, stepper.is_joined = strategy.finish_gradients, False
        stepper.keep_local(models, False)
    run.agree(collectives)


class _JointRun:
    """The steps of one block, on one rank."""

    def __init__(self, stepper: Stepper, comm: Communicator) -> None:
        self._stepper = stepper
        self._comm = comm
        self._gates = list(stepper.gates.values())
        # The micro-batches behind the gradients of each optimizer that this rank left behind when it ended.
        self._left = [0] * len(self._gates)
        # Who stepped last, and whether anybody had ended before that.
        self._source = 0
        self._is_uneven = False

    def finish(self, bundle: Bundle, factor: float | Tensor) -> None:
        """Before a step of this rank: make the gradients the mean over all ranks' micro-batches."""
        assert not isinstance(factor, Tensor), "weights are refused while ranks are joined"
        [optimizer] = bundle.optimizers
        index = next(number for number, gate in enumerate(self._gates) if gate.optimizer is optimizer)
        rows = self._exchange([1, index, round(self._stepper.window.size / factor)])
        self._merge(index, rows)
        self._stepper.strategy.finish_gradients(bundle, 1.0)

    def shadow(self) -> None:
        """After this rank's data has ended: take part in steps until nobody makes one."""
        window = self._stepper.window
        self._left = [window.num_held if window.is_dirty else 0] * len(self._gates)
        window.abandon()
        while True:
            rows = self._exchange([0, 0, 0])
            stepping = [row[1] for row in rows if row[0]]
            if not stepping:
                break
            self._merge(stepping[0], rows)
            self._drop(stepping[0])
        for index in range(len(self._gates)):
            if self._left[index]:
                self._drop(index)

    def agree(self, collectives: Collectives) -> None:
        """Give all ranks the training state of one that stepped to the last, if some ended before."""
        if not self._is_uneven:
            return
        strategy, bundle = self._stepper.strategy, self._stepper.bundle
        own = strategy.read_state(bundle)
        sent = {**own, "schedulers": [_sendable(state) for state in own["schedulers"]]}
        found = collectives.broadcast_object(sent, self._source)
        if self._comm.world.rank != self._source:
            schedulers = zip(own["schedulers"], found["schedulers"], strict=True)
            strategy.write_state(bundle, {**found, "schedulers": [{**mine, **theirs} for mine, theirs in schedulers]})

    def _exchange(self, mine: list[int]) -> list[list[int]]:
        rows = torch.stack(self._comm.all_gather(torch.tensor([*mine, *self._left]))).tolist()
        stepping = [rank for rank, row in enumerate(rows) if row[0]]
        if stepping:
            self._source = stepping[0]
            self._is_uneven |= len(stepping) < len(rows)
        if len({rows[rank][1] for rank in stepping}) > 1:
            which = ", ".join(f"rank {rank} optimizer {rows[rank][1]}" for rank in stepping)
            raise MisuseError(f"ranks step different optimizers at the same time: {which}; step them in the same order")
        return rows

    def _merge(self, index: int, rows: list[list[int]]) -> None:
        """Replace the gradients of an optimizer by their mean over the micro-batches of all ranks."""
        total = sum(row[2] if row[0] else row[3 + index] for row in rows)
        parameters = self._parameters(index)
        gradients = filled_gradients(self._comm, parameters)
        all_reduce_together(self._comm, gradients)
        multiply(gradients, self._stepper.window.size / total)

    def _drop(self, index: int) -> None:
        self._left[index] = 0
        for parameter in self._parameters(index):
            parameter.grad = None

    def _parameters(self, index: int) -> list[Tensor]:
        return [value for value in stepped_parameters(self._gates[index].optimizer) if value.requires_grad]


def _sendable(state: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what ranks do not exchange: a scheduler's settings, such as functions, which are equal anyway."""
    kept: dict[str, Any] = {}
    for name, value in state.items():
        try:
            serialization.encode(value)
        except MisuseError:
            continue
        kept[name] = value
    return kept
