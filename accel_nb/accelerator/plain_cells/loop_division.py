"""Choice of model division or data division for each loop of a plain cell.

In model division every worker reads whole batches, and models divide their rows. That is exact for any loss, and the
code of the loop has whole batches. In data division every worker reads its share of each batch; it is used if the user
has chosen it, and in cells whose calls may differ among ranks.
"""

from __future__ import annotations

import types
import weakref
import zlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from accel_nb.accelerator.core import Accelerator
from accel_nb.accelerator.model_division.divided_calls import DividedCalls
from accel_nb.accelerator.plain_cells.cell_warnings import warn_unequal_batches
from accel_nb.accelerator.prepare.preparer import WorkDivision
from accel_nb.accelerator.process.seeding import synchronize_rng_states
from accel_nb.config.byte_sizes import size_text
from accel_nb.data.index_distribution import ReadMode
from accel_nb.data.loader import read_mode
from accel_nb.runtime.tensors.nested import find_tensors
from accel_nb.strategies.base import Bundle

READ_WHOLE = WorkDivision(False, "read whole by every worker")
_ROWS = WorkDivision(True)
_SMALL_OUTPUT_BYTES = 2**20
_NUM_COMPARED = 64


@dataclass
class _Loop:
    """A loop, identified by its code, its loader and the models and optimizers that were prepared when it began."""

    code: types.CodeType
    loader: weakref.ref[Any]
    objects: dict[int, weakref.ref[Any]]

    def is_of(self, code: types.CodeType, loader: DataLoader[Any], bundle: Bundle) -> bool:
        """Return whether a loop that begins is this one: objects may have been released since, but none prepared."""
        if self.code is not code or self.loader() is not loader:
            return False
        known = (self.objects.get(id(item)) for item in _prepared(bundle))
        return all(reference is not None and reference() is not None for reference in known)


class LoopDivision:
    """Chooses how loops divide their batches. Every rank must begin the same loops."""

    def __init__(self, accelerator: Accelerator, calls: DividedCalls, used: Collection[int]) -> None:
        self._accelerator = accelerator
        self._stepper = accelerator.components.stepper
        self._comm = accelerator.components.comm
        self._calls = calls
        # The ids of the objects that the cell uses, which its receipt lists.
        self._used = used
        self.mode: str = accelerator.resolved.config.divide
        """The option ``divide``, as it applies to the current cell."""
        self._is_on_some_ranks = False
        self.has_read_shares = False
        """Whether a loop has read shares, and no later cell whole batches: what the ranks have counted is of shares."""
        self.has_read_both = False
        """Whether a loop of the cell has read whole batches after one that has read shares."""
        self._loops: list[_Loop] = []
        # The loops whose first batch is being computed. Each is kept with its loader, to which there may be no other
        # reference, and the loader's mode, since the loader may be released while it is iterated.
        self._open: list[tuple[_Loop, DataLoader[Any], ReadMode]] = []
        # By loader: how its whole batches are computed.
        self._divisions: weakref.WeakKeyDictionary[DataLoader[Any], WorkDivision] = weakref.WeakKeyDictionary()

    @property
    def divides_models(self) -> bool:
        """Whether calls of models may be divided."""
        return self.mode in ("auto", "model")

    def begin_cell(self, *, may_depend_on_rank: bool, is_on_some_ranks: bool) -> None:
        """Reset for a new cell.

        With ``divide=auto`` a cell that ``may_depend_on_rank`` gets data division: its calls may differ among ranks.
        With ``is_on_some_ranks``, when only some ranks run the cell, nothing is divided.
        """
        wanted = self._accelerator.resolved.config.divide
        self.mode = "data" if wanted == "auto" and may_depend_on_rank else wanted
        self.mode = "none" if is_on_some_ranks else self.mode
        self._is_on_some_ranks = is_on_some_ranks
        self._stepper.computes_in_main_thread = self._comm.world.size > 1 and self.mode != "data"
        self.has_read_both = False
        self._loops.clear()
        self._close()
        self._divisions.clear()

    def end_cell(self) -> None:
        """End a loop that had one batch only, without a description, and allow threads to take part in exchanges."""
        self._stepper.computes_in_main_thread = False
        self._close()

    def describe_division(self, loader: DataLoader[Any]) -> WorkDivision | None:
        """Return how the work on whole batches of a loader is divided, now or by default; None if ranks read shares."""
        return self._divisions.get(loader, _ROWS) if self.divides_models else None

    def begin_shares(self) -> None:
        """Begin a loop that trains on shares."""
        self.has_read_shares = True

    def begin_whole(self, loader: DataLoader[Any]) -> WorkDivision:
        """Begin a loop in which every rank reads whole batches, as in evaluation; return how the work is divided."""
        self.has_read_shares &= self.mode == "data"
        self.has_read_both |= self.has_read_shares
        self.synchronize_rng()
        return self._divisions.setdefault(loader, _ROWS if self._calls.is_on else READ_WHOLE)

    def begin_training(self, code: types.CodeType, loader: DataLoader[Any]) -> None:
        """Begin a loop that trains on whole batches, whose models are divided."""
        self.has_read_shares = False
        bundle = self._stepper.bundle
        if self._open and self._open[0][0].code is not code:
            self._describe()
        loop = next((item for item in self._loops if item.is_of(code, loader, bundle)), None)
        if loop is not None and any(item is loop for item, _, _ in self._open):
            self._describe()  # the loop had one batch only, and begins again
        mode = read_mode(loader)
        mode.reads_ahead = self._stepper.window.size > 1
        self.synchronize_rng()
        mode.is_whole, mode.on_batch = True, lambda batch: self._compare_first(mode, batch)
        if loop is None:
            objects = {id(item): weakref.ref(item) for item in _prepared(bundle)}
            loop = _Loop(code, weakref.ref(loader), objects)
            self._loops.append(loop)
            self._begin_first_batch(loop, loader)

    def synchronize_rng(self) -> None:
        """Set the random states of all ranks to rank 0's, if they differ; every rank of the cell must call."""
        if self._stepper.has_rank_rng and not self._is_on_some_ranks:
            synchronize_rng_states(("python", "numpy", "torch"))
            self._accelerator.note_equal_rng()

    def _begin_first_batch(self, loop: _Loop, loader: DataLoader[Any]) -> None:
        if not self._open:
            self._calls.start_record()
        mode = read_mode(loader)
        mode.before_next = self._describe
        self._open.append((loop, loader, mode))

    def _compare_first(self, mode: ReadMode, batch: Any) -> None:
        """Compare the first batch of a loop among the ranks; if they differ, stop dividing models and warn."""
        mode.on_batch = None
        digests = [int(value) for value in self._comm.all_gather(torch.tensor([_digest(batch)], device="cpu"))]
        if len(set(digests)) > 1 and self._calls.is_on:
            self._calls.is_on = False
            warn_unequal_batches(self._accelerator)

    def _close(self) -> list[tuple[_Loop, DataLoader[Any], ReadMode]]:
        """Return the loops whose first batch is being computed, and record that there are none."""
        found, self._open = self._open, []
        for _, _, mode in found:
            mode.before_next = None
        return found

    def _describe(self) -> None:
        """Describe in the receipt how the batches of the open loops are computed, by their first batch."""
        loaders = [loader for _, loader, _ in self._close()]
        division = self._find_division(loaders)
        changed = False
        for loader in loaders:
            self._divisions[loader] = division
            changed |= self._accelerator.components.preparer.record_division(loader, division)
        if changed:
            self._accelerator.report(self._used)

    def _find_division(self, loaders: list[DataLoader[Any]]) -> WorkDivision:
        if divided := list(self._calls.divided):
            cost = self._describe_cost(loaders)
            return WorkDivision(True, f" in {', '.join(divided)}" + ("" if cost is None else f" ({cost})"))
        causes = [f"{name}: {found.reason}" for name, found in self._calls.undivided.items()]
        text = "; ".join(causes) if self._calls.is_on else "the workers have different batches"
        text = text or "only parts of models are called"
        return WorkDivision(False, f"computed whole by every worker ({text})")

    def _describe_cost(self, loaders: list[DataLoader[Any]]) -> str | None:
        """Describe the cost that data division would save; None if it is small.

        It is the user's choice: the code of the loop would compute with its own share of each batch only, which is
        right for losses that are sums or means over samples.
        """
        if any(loader.num_workers for loader in loaders):
            return "every worker reads all samples; --divide data reads shares"
        # Reads `_parameters`: in a sharded model `parameters()` may gather them, a collective of all ranks.
        parts = (part for model in self._stepper.bundle.models for part in model.modules())
        own = {id(value): value for part in parts for value in part._parameters.values() if value is not None}
        num_gradient_bytes = sum(value.numel() * value.element_size() for value in own.values() if value.requires_grad)
        num_bytes = self._calls.exchange.num_bytes
        if num_bytes <= max(_SMALL_OUTPUT_BYTES, num_gradient_bytes):
            return None
        return f"each step exchanges {size_text(num_bytes)} of outputs; --divide data exchanges none"


def _prepared(bundle: Bundle) -> Iterator[Any]:
    return chain(bundle.models, bundle.optimizers)


def _digest(batch: Any) -> int:
    """Return a checksum of a few values of each tensor in a batch."""
    found = 0
    for tensor in find_tensors(batch):
        # A subclass may not support slicing.
        flat = _dense_values(tensor.detach()).as_subclass(Tensor).reshape(-1)
        few = flat[:: max(1, flat.numel() // _NUM_COMPARED)][:_NUM_COMPARED]
        found = zlib.crc32(few.cpu().contiguous().view(torch.uint8).numpy().tobytes(), found)
    return found


def _dense_values(tensor: Tensor) -> Tensor:
    """Return the values of a tensor, which may be sparse, nested or quantized, as a dense tensor."""
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
    if tensor.layout is not torch.strided or tensor.is_nested:
        tensor = tensor.values()
    return tensor.int_repr() if tensor.is_quantized else tensor.resolve_conj().resolve_neg()
