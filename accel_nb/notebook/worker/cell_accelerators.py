"""The accelerators of the cells on one rank: one for plain cells, one for explicit cells, and those of the user."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from accel_nb.accelerator import Accelerator
from accel_nb.accelerator.plain_cells.autoprepare import PlainCells
from accel_nb.accelerator.plain_cells.detection.object_graph import find_sharded_tensors
from accel_nb.config import Resolved
from accel_nb.notebook.cells.user_names import ACCELERATOR_NAME
from accel_nb.notebook.messages import RunRequest
from accel_nb.notebook.worker.cell_worker import CellWorker
from accel_nb.pool.sync.result_transfer import PackedReturn
from accel_nb.runtime import rng
from accel_nb.runtime.distributed import sharded
from accel_nb.runtime.distributed.communicator import Communicator, LocalComm, TorchComm


class CellAccelerators:
    """Creates, binds and closes the accelerators that cells use."""

    def __init__(self, worker: CellWorker, namespace: dict[str, Any]) -> None:
        self._worker = worker
        self._namespace = namespace
        self._own: dict[str, tuple[Resolved, Accelerator]] = {}
        self._plain: tuple[Accelerator, PlainCells] | None = None
        # Objects that the explicit cells' previous accelerator had prepared; the next one prepares them again.
        self._objects_to_prepare: tuple[Any, ...] = ()
        # Accelerators of an old process group whose models are still sharded.
        self._suspended: list[Accelerator] = []
        # Suspended accelerators whose models cannot be gathered, since a rank with a shard has died.
        self._incomplete: weakref.WeakSet[Accelerator] = weakref.WeakSet()
        # Whether accelerators of an old process group had gradients that their strategy held.
        self._has_lost_gradients = False
        # Whether accumulation windows were discarded since the last cell.
        self._has_discarded_windows = False

    @property
    def last_share(self) -> Any:
        """The share of the last batch that the last plain cell has divided; None if it has divided none."""
        return None if self._plain is None else self._plain[1].last_share

    def reset_share(self) -> None:
        """Forget the share of the last divided batch."""
        if self._plain is not None:
            self._plain[1].last_share = None

    def open_accelerators(self) -> list[Accelerator]:
        """Return the open accelerators of cells and of the user's names, in the same order on every rank."""
        known = [accelerator for _, accelerator in list(self._own.values())]
        known += [value for value in list(self._namespace.values()) if isinstance(value, Accelerator)]
        found = {id(item): item for item in known}.values()
        return [item for item in found if not item.is_closed and item not in self._incomplete]

    def has_prepared_explicitly(self) -> bool:
        """Return whether earlier cells have prepared objects explicitly, which the next cell may use."""
        plain = self._own.get("plain")
        return any(item.prepared_objects for item in self.open_accelerators() if plain is None or item is not plain[1])

    def get_accelerator(self, kind: str, resolved: Resolved, *, is_on_some_ranks: bool) -> Accelerator:
        """Return the accelerator for ``plain`` or ``explicit`` cells, a new one if the options changed."""
        current = self._own.get(kind)
        if current is not None and (current[0] is resolved or current[0].training_key == resolved.training_key):
            return current[1]
        self._close(kind)
        world, group = self._worker.world, self._worker.group
        comm = LocalComm(world) if group is None or world.size == 1 else TorchComm(world, group)
        accelerator = Accelerator(world=world, comm=comm)
        self._own[kind] = (resolved, accelerator)
        if kind == "explicit" and self._objects_to_prepare and not is_on_some_ranks:
            unattached, self._objects_to_prepare = self._objects_to_prepare, ()
            accelerator.prepare(*unattached)
        return accelerator

    def get_plain_cells(self, accelerator: Accelerator) -> PlainCells:
        """Return the preparation of plain cells with an accelerator."""
        if self._plain is None or self._plain[0] is not accelerator:
            self._plain = accelerator, PlainCells(accelerator)
        return self._plain[1]

    def bind_name(self, accelerator: Accelerator) -> None:
        """Bind ``accelerator`` for the cell, unless the user has bound an open one of their own."""
        bound = self._namespace.get(ACCELERATOR_NAME)
        is_own = any(bound is own for _, own in self._own.values())
        if not isinstance(bound, Accelerator) or is_own or bound.is_closed or bound in self._incomplete:
            self._namespace[ACCELERATOR_NAME] = accelerator

    def suspend(self) -> None:
        """Close the accelerators of the old process group; the next cell prepares its objects again.

        Those with sharded models stay open until `close_suspended`: gathering a model needs all ranks, and some may
        have died.
        """
        self.discard_windows()
        self._has_lost_gradients |= any(accelerator.holds_gradients for accelerator in self.open_accelerators())
        self._suspended = [accelerator for accelerator in self.open_accelerators() if accelerator.sharded_tensors()]
        for kind, (_, accelerator) in list(self._own.items()):
            if accelerator in self._suspended:
                del self._own[kind]
            else:
                self._close(kind, is_alone=True)
        for value in list(self._namespace.values()):
            if isinstance(value, Accelerator) and value not in self._suspended:
                value.close(is_alone=True)

    def discard_windows(self) -> None:
        """Drop the gradients of open accumulation windows after a cell that has failed on some rank; all ranks call."""
        for accelerator in self.open_accelerators():
            self._has_discarded_windows |= accelerator.discard_window()

    def pop_lines(self) -> list[str]:
        """Return lines on what was lost since the last call."""
        lost, self._has_lost_gradients = self._has_lost_gradients, False
        discarded, self._has_discarded_windows = self._has_discarded_windows, False
        return [_LOST_GRADIENTS] * lost + [_DISCARDED_WINDOW] * discarded

    def close_suspended(self) -> None:
        """Close the suspended accelerators, which gathers their models; all ranks must call it."""
        suspended, self._suspended = self._suspended, []
        for accelerator in suspended:
            accelerator.close(is_alone=True)

    def drop_suspended(self) -> None:
        """Drop suspended accelerators and the objects of explicit cells: a rank with a shard of them was lost."""
        suspended, self._suspended = self._suspended, []
        self._objects_to_prepare = ()
        self._incomplete.update(suspended)

    def synchronize_rng(self, request: RunRequest, seed: int | None) -> None:
        """Make the random generators of all ranks equal at the start of a cell; loaders that shard change that.

        All ranks must call it, since rank 0's states are broadcast.
        """
        diverged = [accelerator for accelerator in self.open_accelerators() if accelerator.has_rank_rng]
        if seed is not None:
            rng.set_seed(seed)
        elif diverged:
            group = self._worker.group
            if group is None or request.is_on_some_ranks:
                return
            states = rng.capture()
            message = TorchComm(self._worker.world, group).broadcast(rng.pack(states), 0)
            rng.restore(rng.unpack(message, states))
        for accelerator in diverged:
            accelerator.note_equal_rng()

    def collect_with_shards(
        self, collect: Callable[[], PackedReturn | None], is_hidden: Callable[[str, Any], bool]
    ) -> PackedReturn | None:
        """Collect values on rank 0 while the other ranks send their shards; return None if nothing is sharded.

        All ranks must call it. It can be interrupted, since it waits for ranks that may have died. Values of names for
        which ``is_hidden`` returns True are not read.
        """
        accelerators = [item for item in self.open_accelerators() if item.sharded_tensors() or item.held_gradients()]
        if not accelerators or self._worker.group is None:
            return None
        comm = TorchComm(self._worker.world, self._worker.group)
        try:
            with self._worker.interruptible():
                for accelerator in accelerators:
                    accelerator.complete_state()
                tensors = [tensor for accelerator in accelerators for tensor in accelerator.sharded_tensors()]
                names = [name for name, value in sorted(self._namespace.items()) if not is_hidden(name, value)]
                gradients = [gradient for accelerator in accelerators for gradient in accelerator.held_gradients()]
                tensors += _find_sharded_values(comm, tensors, gradients, [self._namespace[name] for name in names])
                if not self._worker.world.is_main:
                    sharded.serve_reads(comm, tensors)
                    return None
                with sharded.lead_reads(comm, tensors):
                    return collect()
        except (KeyboardInterrupt, RuntimeError):
            return None

    def _close(self, kind: str, *, is_alone: bool = False) -> None:
        removed = self._own.pop(kind, None)
        if removed is not None:
            if kind == "explicit":
                self._objects_to_prepare = (*self._objects_to_prepare, *removed[1].prepared_objects)
            removed[1].close(is_alone=is_alone)


_LOST_GRADIENTS = (
    "the gradients of divided models were dropped when the workers were stopped, after an error or an interrupt: run "
    "the backward pass again before a step that uses them"
)


_DISCARDED_WINDOW = (
    "the last cell has ended inside of an accumulation window: its gradients are dropped, and this cell begins a new "
    "one"
)


def _find_sharded_values(
    comm: Communicator, sharded_tensors: Sequence[Tensor], gradients: Sequence[Tensor], values: Sequence[Any]
) -> list[Tensor]:
    """Return gradients and attributes of ``sharded_tensors``, ``gradients``, and sharded tensors in values.

    Returns none if the ranks have different ones.
    """
    is_known = set(map(id, sharded_tensors))
    found = [*gradients]
    found += [tensor.grad for tensor in sharded_tensors if tensor.is_leaf and tensor.grad is not None]
    found += [value for tensor in sharded_tensors for value in vars(tensor).values() if sharded.is_sharded(value)]
    found += [tensor for tensor in find_sharded_tensors(values) if id(tensor) not in is_known]
    first, *others = comm.all_gather_json([list(sharded.full_shape(tensor)) for tensor in found])
    return found if all(shapes == first for shapes in others) else []
