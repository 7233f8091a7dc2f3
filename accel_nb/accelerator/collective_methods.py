"""Methods of `Accelerator` that exchange values between ranks."""

from __future__ import annotations

import sys
from typing import Any, TypeVar

import torch

from accel_nb.accelerator.components import Components
from accel_nb.accelerator.process_state import ProcessView
from accel_nb.accelerator.tracking.metrics import RowHistory, cut_to_samples, gather_for_metrics
from accel_nb.accelerator.training.trigger import Trigger
from accel_nb.data.order import BatchShare
from accel_nb.runtime.distributed.communicator import Operation

T = TypeVar("T")


class CollectiveMethods(ProcessView):
    """Collectives over nested tensors and plain values, a base class of `Accelerator`."""

    components: Components
    _trigger: Trigger
    _row_history: RowHistory
    _share_ranks: list[int] | None = None

    def gather(self, tensor: T) -> T:
        """Return all ranks' tensors concatenated along the first dim, in rank order; first dims may differ.

        Tensors may be nested in tuples, lists, mappings and dataclasses; they are sent in one message. Scalars become a
        tensor with one value per rank. Every rank must call. Raises `MisuseError` on all ranks if structures, dtypes or
        other dims differ.
        """
        return self._collectives.gather(tensor)

    def gather_for_metrics(self, input_data: T, use_gather_object: bool = False) -> T:
        """Gather values computed from a prepared loader's batch: each sample once, in the loader's order.

        Every rank must call, inside of the loop, for each batch. Samples that were repeated as padding are removed. A
        tensor that has as many rows for a short batch as for the previous one, such as ``loss.repeat(BATCH_SIZE)``, is
        cut to the samples of the batch. If every rank has read the whole batch, as in an evaluation in a plain cell,
        nothing is gathered. With ``use_gather_object``, or without any tensor, values are sent as `gather_object` sends
        them: the result is a list of all ranks' values, or of the items of their lists or tensors. With
        ``use_gather_object`` a single process gets its own value back, as it is.

        Rows are the items along the first dim of tensors and NumPy arrays, and the items of lists, at any depth. A list
        whose length is no multiple of the number of samples has an item for each field, if the lengths of its items are
        multiples. Raises `MisuseError` on every rank if rows of repeated samples cannot be determined, or the ranks
        pass values of different kinds.
        """
        caller = sys._getframe(1)
        site = caller.f_code, caller.f_lasti
        share, undivided = self.components.stepper.window.share, self.components.preparer.undivided_batch
        is_undivided = undivided.is_current(share)
        if is_undivided or (share is not None and share.is_whole):
            num_samples = undivided.num_samples if is_undivided or share is None else share.total_samples
            if self._world.size > 1:
                if num_samples is None:
                    return input_data
                return cut_to_samples(input_data, num_samples, self._row_history, site)
            share = (
                None if num_samples is None else BatchShare(num_samples, num_samples, is_last=False, is_filler=False)
            )
        if self._share_ranks is None:
            self._share_ranks = self._first_rank_of_each_share()
        return gather_for_metrics(
            input_data, self._comm, self._collectives, share, self._share_ranks, self._row_history, site,
            as_objects=use_gather_object,
        )  # fmt: skip

    def gather_object(self, value: Any) -> list[Any]:
        """Return all ranks' values in a list; if all are lists, their items in one list, as accelerate does.

        Values are plain Python, NumPy arrays and tensors (returned on the CPU); nothing is pickled. Every rank must
        call. Raises `MisuseError` on all ranks if one passes another type.
        """
        values = self._collectives.gather_objects(value)
        if all(isinstance(item, list) for item in values):
            return [item for items in values for item in items]
        return values

    def broadcast_object_list(self, values: list[Any], from_process: int = 0) -> list[Any]:
        """Replace a list's items by the items of one rank's list, in place, and return it; see `gather_object`."""
        values[:] = self._collectives.broadcast_object(values, from_process)
        return values

    def reduce(self, tensor: T, reduction: Operation = "sum", scale: float = 1.0) -> T:
        """Return the sum, mean, maximum or minimum over ranks, times ``scale``; every rank must call.

        Shapes must be equal on all ranks; the option ``debug`` checks this.
        """
        return self._collectives.reduce(tensor, reduction, scale)

    def broadcast(self, tensor: T, from_process: int = 0) -> T:
        """Return one rank's tensors on every rank; shapes and dtypes must be equal. Every rank must call."""
        return self._collectives.broadcast(tensor, from_process)

    def scatter(self, tensor: T | None, from_process: int = 0) -> T:
        """Return this rank's share of one rank's tensors, divided along the first dim; every rank must call.

        Lengths of shares differ by at most one. The other ranks pass None, or the same structure, so that their own
        container types are returned.
        """
        return self._collectives.scatter(tensor, from_process)

    def pad_across_processes(self, tensor: T, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> T:
        """Return tensors padded along ``dim`` to the longest length on any rank; every rank must call."""
        return self._collectives.pad_across(tensor, dim, pad_index, pad_first=pad_first)

    def set_trigger(self) -> None:
        """Set a flag that the next `check_trigger` returns on every rank. Any rank may call; nothing is sent."""
        self._trigger.set()

    def check_trigger(self, *, wait: bool = True) -> bool:
        """Return whether any rank has set the flag, the same on every rank, and reset it; every rank must call.

        Ranks exchange a number of four bytes on the CPU; devices are not synchronized. A check detects each flag that
        was set before it. With ``wait=False`` ranks do not wait for each other: a check starts an exchange in the
        background and returns the result of the previous one, so a flag is detected one check later. All ranks must
        pass the same ``wait``.
        """
        self._collectives.verify("check_trigger", None)
        return self._trigger.check(wait=wait)

    def _first_rank_of_each_share(self) -> list[int]:
        """Return the first rank that reads each share of the data; every rank must call, once."""
        index, count = self.components.strategy.data_coords()
        if count == self._world.size:
            return list(range(count))
        indices = [int(found) for found in self._comm.all_gather(torch.tensor([index], device="cpu"))]
        return [indices.index(number) for number in range(count)]
