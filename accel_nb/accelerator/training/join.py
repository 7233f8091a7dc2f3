"""Training with uneven inputs: ranks that have run out of data take part in the steps of the other ranks.

Inside of `Accelerator.join_uneven_inputs` gradients are not averaged during backward. Before each step the ranks
exchange which optimizer they step and how many micro-batches its gradients include. Then gradients are summed over
ranks and divided by the total number of micro-batches. A rank that has run out of data first contributes the gradients
that it has accumulated since its last optimizer step, and zeros after that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from accel_nb.accelerator.training.stepper import REFUSED_IN_JOIN, Stepper
from accel_nb.data.loader import set_even_batches
from accel_nb.errors import MisuseError
from accel_nb.runtime.distributed.collectives import Collectives, all_reduce_bucketed
from accel_nb.runtime.distributed.communicator import Communicator
from accel_nb.runtime.distributed.gradients import fill_missing_gradients
from accel_nb.runtime.process import serialization
from accel_nb.runtime.tensors.stepped import stepped_parameters
from accel_nb.strategies.base import Bundle, multiply_tensors


@contextmanager
def override_even_batches(loaders: Iterable[DataLoader[Any]], is_on: bool) -> Iterator[None]:
    """Override the option ``even_batches`` of sharded loaders, for the iterations that begin inside of the block."""
    before = [(loader, set_even_batches(loader, is_on)) for loader in loaders]
    try:
        yield
    finally:
        for loader, was_on in before:
            set_even_batches(loader, was_on)


@contextmanager
def join_uneven(stepper: Stepper, comm: Communicator, collectives: Collectives) -> Iterator[None]:
    """Allow ranks to run out of data at different times inside of the block; see `Accelerator.join_uneven_inputs`."""
    if comm.world.size == 1:
        yield
        return
    if not stepper.bundle.optimizers:
        raise MisuseError("join_uneven_inputs has nothing to join: prepare the model and its optimizer first")
    run = _UnevenRun(stepper, comm)
    strategy, models = stepper.strategy, stepper.bundle.models
    stepper.average_replicas()
    stepper.set_local_gradients(models, True)
    stepper.finish_gradients, stepper.is_joined = run.finish, True
    collectives.blocked_reason = REFUSED_IN_JOIN
    try:
        yield
        run.join_other_steps()
    finally:
        collectives.blocked_reason = None
        stepper.finish_gradients, stepper.is_joined = strategy.finish_gradients, False
        stepper.set_local_gradients(models, False)
    run.synchronize(collectives)


class _UnevenRun:
    """The steps of one block, on one rank."""

    def __init__(self, stepper: Stepper, comm: Communicator) -> None:
        self._stepper = stepper
        self._comm = comm
        self._proxies = list(stepper.optimizer_proxies.values())
        # By optimizer: how many micro-batches the gradients since this rank's last step include.
        self._num_leftover = [0] * len(self._proxies)
        # The lowest rank that made the last step, and whether any rank had run out of data before that step.
        self._source = 0
        self._is_uneven = False

    def finish(self, bundle: Bundle, factor: float | Tensor) -> None:
        """Replace the gradients by the mean over all ranks' micro-batches, before a step of this rank.

        The arguments are the same as of `Strategy.finish_gradients`: ``factor`` is the size of a window divided by the
        number of its micro-batches, which is more than 1 if the loader's last batch has closed the window early.
        """
        assert not isinstance(factor, Tensor), "loss weights are refused inside of join_uneven_inputs"
        [optimizer] = bundle.optimizers
        index = next(number for number, proxy in enumerate(self._proxies) if proxy.optimizer is optimizer)
        num_micro_batches = round(self._stepper.window.size / factor)
        rows = self._exchange([1, index, num_micro_batches])
        self._merge(index, rows)
        self._stepper.strategy.finish_gradients(bundle, 1.0)

    def join_other_steps(self) -> None:
        """Join the steps of other ranks, after this rank has run out of data, until no rank steps."""
        window = self._stepper.window
        self._num_leftover = [window.num_pending if window.has_gradients else 0] * len(self._proxies)
        window.discard()
        while True:
            rows = self._exchange([0, 0, 0])
            stepping = [row[1] for row in rows if row[0]]
            if not stepping:
                break
            self._merge(stepping[0], rows)
            self._drop_gradients(stepping[0])
        for index in range(len(self._proxies)):
            if self._num_leftover[index]:
                self._drop_gradients(index)

    def synchronize(self, collectives: Collectives) -> None:
        """Broadcast the training state of a rank that made the last step, if another rank ran out of data before it.

        The state includes the number of steps, by which ranks save together.
        """
        if not self._is_uneven:
            return
        strategy, bundle = self._stepper.strategy, self._stepper.bundle
        own = strategy.read_state(bundle)
        sent = {
            **own,
            "models": [dict(state) for state in own["models"]],
            "schedulers": [_serializable(state) for state in own["schedulers"]],
        }
        found, num_steps = collectives.broadcast_object((sent, self._stepper.num_steps), self._source)
        if self._comm.world.rank != self._source:
            self._stepper.meter.step = num_steps
            schedulers = zip(own["schedulers"], found["schedulers"], strict=True)
            merged = [{**state, **received} for state, received in schedulers]
            strategy.write_state(bundle, {**found, "schedulers": merged})

    def _exchange(self, own: list[int]) -> list[list[int]]:
        """Return each rank's row: whether it steps, the optimizer's number, its micro-batches, and those left over."""
        rows = torch.stack(self._comm.all_gather(torch.tensor([*own, *self._num_leftover], device="cpu"))).tolist()
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
        gradients = fill_missing_gradients(self._comm, parameters)
        all_reduce_bucketed(self._comm, gradients)
        multiply_tensors(gradients, self._stepper.window.size / total)

    def _drop_gradients(self, index: int) -> None:
        self._num_leftover[index] = 0
        for parameter in self._parameters(index):
            parameter.grad = None

    def _parameters(self, index: int) -> list[Tensor]:
        return [value for value in stepped_parameters(self._proxies[index].optimizer) if value.requires_grad]


def _serializable(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a scheduler's state without values that cannot be serialized, such as functions."""
    kept: dict[str, Any] = {}
    for name, value in state.items():
        try:
            serialization.encode(value)
        except MisuseError:
            continue
        kept[name] = value
    return kept
