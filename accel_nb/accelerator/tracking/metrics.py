"""Gathering of the values that ranks compute from their batches: each sample once, in the loader's order."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from accel_nb.data.order import BatchShare
from accel_nb.errors import MisuseError
from accel_nb.runtime.distributed.collectives import Collectives
from accel_nb.runtime.distributed.communicator import Communicator
from accel_nb.runtime.tensors.nested import find_tensors, map_leaves

_PLAIN = (bool, int, float, str, type(None))


class RowHistory:
    """For each call site of `gather_for_metrics`: how many rows it passed, and for how many samples.

    If a call site passes the same number of rows for a short batch as for all full batches, its rows are padded, as by
    ``loss.repeat(BATCH_SIZE)``. Then the rows beyond the samples are cut off.
    """

    def __init__(self) -> None:
        # By call site: samples and rows of the previous batch, and whether all full batches had that number of rows.
        self._last: dict[Any, tuple[int, int, bool]] = {}

    def num_kept(self, site: Any, num_rows: int, share: BatchShare) -> int | None:
        """Return the number of first rows that belong to samples and are no padding; None if that is unknown.

        ``site`` identifies the call site and the tensor in its arguments. Rows of one sample must be adjacent.
        """
        if share.is_filler:
            return 0
        num_samples, before = share.num_samples, self._last.get(site)
        is_steady = before is None or before[0] != num_samples or (before[2] and before[1] == num_rows)
        if share.is_last:
            self._last.pop(site, None)
        else:
            self._last[site] = num_samples, num_rows, is_steady
        if before is not None and before[2] and num_samples < before[0] and num_rows == before[1]:
            num_each, rest = divmod(num_rows, before[0])
            if not rest:
                return num_each * share.num_valid
        if not share.num_repeated:
            return num_rows
        return None if num_rows % num_samples else num_rows // num_samples * share.num_valid


class UndividedBatch:
    """Records whether the latest batch is undivided, so that every rank has all of its samples."""

    def __init__(self) -> None:
        self._iterator: weakref.ref[Any] | None = None
        self._share: BatchShare | None = None
        # The number of samples of the batch; None where they cannot be counted.
        self.num_samples: int | None = None

    def record(self, iterator: Any, share: BatchShare | None, num_samples: int | None) -> None:
        """Record an undivided batch from ``iterator`` (None: its end), and the latest ``share`` of a divided loader."""
        self._iterator = None if iterator is None else weakref.ref(iterator)
        self._share = share
        self.num_samples = num_samples

    def is_current(self, share: BatchShare | None) -> bool:
        """Return whether the recorded batch is still the latest one, and its iterator still exists."""
        return self._iterator is not None and self._iterator() is not None and self._share is share


def gather_for_metrics(
    nested: Any,
    comm: Communicator,
    collectives: Collectives,
    share: BatchShare | None,
    owners: Sequence[int],
    history: RowHistory,
    site: Any,
    *,
    as_objects: bool = False,
) -> Any:
    """Return all ranks' values for a batch, joined in the loader's order; every rank must call.

    ``owners`` are the ranks whose values are used, one for each share of the data. Tensors, NumPy arrays and lists of
    plain values are concatenated along the first dim, at any depth. Scalar tensors become a tensor with one value for
    each rank that has a sample which is not repeated; so does a single row from several samples. Other values remain
    this rank's. Rows of filler samples are removed, and so are the padded rows of a short batch, which ``history``
    detects; ``site`` identifies the call.

    With ``as_objects``, or without tensors, the result is a list of the ranks' values, or of the items of their lists
    or tensors; with ``as_objects`` a single rank's value is returned as it is. In these values too, rows are removed
    from tensors, arrays and lists at any depth. A list has a row for each sample, or several, unless its length is no
    multiple of their number and the lengths of all its items are: then it has an item for each field.

    Raises `MisuseError`, on every rank, if a batch has filler samples and its rows cannot be assigned to samples, and
    if the ranks pass values of different structures.
    """
    row_filter = _RowFilter(share, history, site)
    if isinstance(nested, Tensor) and not as_objects:
        return _gather_tensors([nested.detach()], None, row_filter, collectives, owners)[0]
    if as_objects or next(find_tensors(nested), None) is None:
        if as_objects and comm.world.size == 1:
            own = row_filter.select_all(nested)
            _raise_for(row_filter.problem, [])
            return own
        return _gather_values(nested, collectives, row_filter, owners)
    tensors: list[Tensor] = []
    others: list[Any] = []

    def collect(leaf: Any) -> Any:
        """Collect a leaf, and return its placeholder in the structure, which must be equal on every rank."""
        if isinstance(leaf, Tensor):
            tensors.append(leaf.detach())
            return leaf
        if not _are_rows(leaf):
            return None
        others.append(leaf)
        return leaf[:0]

    like = map_leaves(collect, nested, is_leaf=_are_rows)
    kept = [row_filter.select(part) for part in others]
    joined = iter(_gather_tensors(tensors, like, row_filter, collectives, owners))
    everyone = collectives.gather_objects(kept) if comm.world.size > 1 and others else [kept] * comm.world.size
    columns = iter([_joined([everyone[rank][at] for rank in owners]) for at in range(len(others))])

    def replace(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return next(joined)
        return next(columns) if _are_rows(leaf) else leaf

    return map_leaves(replace, nested, is_leaf=_are_rows)


def cut_to_samples(nested: Any, num_samples: int, history: RowHistory, site: Any) -> Any:
    """Return values that were computed from an undivided batch, without padded rows; see `RowHistory`."""
    row_filter = _RowFilter(BatchShare(num_samples, num_samples, False, False), history, site)
    return map_leaves(
        lambda leaf: row_filter.select(leaf) if _has_rows(leaf) else leaf,
        nested,
        is_leaf=_are_rows,
    )


class _RowFilter:
    """Selects the rows to keep from the tensors, arrays and lists of one value, which must be passed in their order."""

    def __init__(self, share: BatchShare | None, history: RowHistory, site: Any) -> None:
        self.problem: str | None = None
        self._share = share
        self._history = history
        self._site = site
        self._number = 0
        self._has_cut = False

    def select_all(self, nested: Any) -> Any:
        """Return a value with the rows to keep of each tensor, array and list of rows in it; see `select`."""
        if self._share is None:
            return nested
        self._has_cut = False
        found = map_leaves(
            lambda leaf: self.select(leaf) if _has_rows(leaf) else leaf,
            nested,
            is_leaf=lambda item: not self._has_fields(item),
        )
        return found if self._has_cut else nested

    def select(self, rows: Any) -> Any:
        """Return the rows to keep of a tensor, array or list; set ``problem`` if they cannot be determined."""
        share = self._share
        if share is None:
            return rows
        if isinstance(rows, Tensor) and not rows.dim():
            return rows.reshape(1)[: 1 if share.num_valid else 0]
        self._number += 1
        num_rows = len(rows)
        if num_rows == 1 and share.num_samples > 1:  # a value of the rank, such as a count
            self._has_cut = True
            return rows[: 1 if share.num_valid else 0]
        num_kept = self._history.num_kept((self._site, self._number), num_rows, share)
        if num_kept is None:
            self.problem = self.problem or _describe_problem(num_rows, share)
            return rows
        if num_kept == num_rows:
            return rows
        self._has_cut = True
        return rows[:num_kept]

    def _has_fields(self, item: Any) -> bool:
        """Return whether a value is a container of fields, and not a list with rows for each sample."""
        if not isinstance(item, list):
            return not _has_rows(item)
        num_samples = 1 if self._share is None else max(self._share.num_samples, 1)
        lengths = [len(child) if _has_rows(child) else -1 for child in cast("list[Any]", item)]
        return len(lengths) % num_samples > 0 and all(length >= 0 and not length % num_samples for length in lengths)


def _gather_tensors(
    tensors: list[Tensor], like: Any, row_filter: _RowFilter, collectives: Collectives, owners: Sequence[int]
) -> list[Tensor]:
    """Concatenate tensors over ranks; all ranks raise if rows of one rank cannot be assigned to samples.

    ``like`` is the structure with the tensors, which must be equal on all ranks; None for a single tensor.
    """
    own = [part if part.dim() else part.reshape(1) for part in map(row_filter.select, tensors)]
    problem = None if row_filter.problem is None else MisuseError(row_filter.problem)
    parts = collectives.gather_each(own, problem, like)
    joined = [torch.cat(column) for column in zip(*[parts[rank] for rank in owners], strict=True)]
    if collectives.keeps_scalars and len(parts) == 1:
        return [new if old.dim() else new.reshape(()) for old, new in zip(tensors, joined, strict=True)]
    return joined


def _gather_values(value: Any, collectives: Collectives, row_filter: _RowFilter, owners: Sequence[int]) -> Any:
    own = row_filter.select_all(value)
    problem = row_filter.problem
    everyone = collectives.gather_objects({"value": own} if problem is None else {"problem": problem})
    _raise_for(row_filter.problem, [rank for rank, found in enumerate(everyone) if "problem" in found])
    values = [everyone[rank]["value"] for rank in owners]
    if all(_has_rows(found) and not isinstance(found, np.ndarray) for found in values):
        return [item for found in values for item in found]
    return values


def _has_rows(value: Any) -> bool:
    return isinstance(value, list) or (isinstance(value, Tensor | np.ndarray) and value.ndim > 0)


def _raise_for(problem: str | None, ranks: list[int]) -> None:
    if problem is not None:
        raise MisuseError(problem)
    if ranks:
        raise MisuseError(f"gather_for_metrics failed on rank {ranks[0]}; see the error of that rank")


def _describe_problem(num_rows: int, share: BatchShare) -> str:
    return (
        f"gather_for_metrics got {num_rows} rows from a batch of {share.num_samples} samples, the last "
        f"{share.num_repeated} of which even_batches has repeated: which rows belong to these is unknown. Gather the "
        "same number of rows for each sample, or set even_batches to False"
    )


def _are_rows(item: Any) -> bool:
    """Return whether a value is a list of plain values, or an array of them, which ranks can exchange."""
    if isinstance(item, np.ndarray):
        return item.ndim > 0 and item.dtype.kind != "O"
    return type(item) is list and all(isinstance(value, _PLAIN) for value in item)


def _joined(parts: list[Any]) -> Any:
    """Return the rows of all ranks."""
    return np.concatenate(parts) if isinstance(parts[0], np.ndarray) else [value for part in parts for value in part]
