"""Gathering what was computed from the batches of prepared loaders: each sample once, in the loader's order."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from accel_nb.data.order import Share
from accel_nb.errors import MisuseError
from accel_nb.runtime.collectives import Collectives
from accel_nb.runtime.comm import Communicator
from accel_nb.runtime.nested import find_tensors, map_leaves

_PLAIN = (bool, int, float, str, type(None))


class WholeReading:
    """Whether the batch that was delivered last is one that every rank has whole."""

    def __init__(self) -> None:
        self._iterator: weakref.ref[Any] | None = None
        self._share: Share | None = None

    def take(self, iterator: Any, share: Share | None) -> None:
        """Hear of a batch that ``iterator`` delivers whole while ``share`` is the latest share; None at its end."""
        self._iterator = None if iterator is None else weakref.ref(iterator)
        self._share = share

    def lasts(self, share: Share | None) -> bool:
        """Whether nothing was delivered since, and the loop over the whole loader was not left."""
        return self._iterator is not None and self._iterator() is not None and self._share is share


def gather_for_metrics(
    nested: Any,
    comm: Communicator,
    collectives: Collectives,
    share: Share | None,
    owners: Sequence[int],
    *,
    as_objects: bool = False,
) -> Any:
    """Return what every rank computed from its share of a batch, joined in the loader's order.

    ``owners`` are the ranks that count, one for each share of the data. Tensors, and lists of plain values with one for
    each sample, are joined along the first dim, at any depth; a scalar tensor becomes a tensor of one value for each
    rank; other values stay this rank's. Samples that were only filled in are left out. With ``as_objects``, or where
    there is no tensor, the value is one JSON can hold, and lists are joined. Every rank must call.

    Raises `MisuseError` for what belongs to no sample where samples were filled in, so that it could not be left out.
    """
    if isinstance(nested, Tensor) and not as_objects:
        return _joined([nested.detach()], [], collectives, share, owners)[0]
    if as_objects or next(find_tensors(nested), None) is None:
        return _objects(nested, comm, share, owners)
    tensors: list[Tensor] = []
    lists: list[list[Any]] = []

    def collect(leaf: Any) -> None:
        if isinstance(leaf, Tensor):
            tensors.append(leaf.detach())
        elif isinstance(leaf, list):
            lists.append(leaf)

    map_leaves(collect, nested, is_leaf=_is_list_of_values)
    joined = iter(_joined(tensors, lists, collectives, share, owners))
    kept = [_valid(part, share) for part in lists]
    everyone = comm.all_gather_json(kept) if comm.world.size > 1 and lists else [kept] * comm.world.size
    columns = iter([[value for rank in owners for value in everyone[rank][at]] for at in range(len(lists))])

    def replace(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return next(joined)
        return next(columns) if isinstance(leaf, list) else leaf

    return map_leaves(replace, nested, is_leaf=_is_list_of_values)


def _joined(
    tensors: list[Tensor],
    lists: list[list[Any]],
    collectives: Collectives,
    share: Share | None,
    owners: Sequence[int],
) -> list[Tensor]:
    """Join tensors over ranks; every rank raises where one has rows that belong to no sample."""
    if share is None or not (share.is_filler or share.num_repeated):  # in almost every step
        return _columns(collectives.gather_each([part if part.dim() else part.reshape(1) for part in tensors]), owners)
    problem = _problem([len(part) for part in (*tensors, *lists) if not isinstance(part, Tensor) or part.dim()], share)
    own = tensors if problem else [_rows(part, share) for part in tensors]
    parts = collectives.gather_each(own, None if problem is None else MisuseError(problem))
    return _columns(parts, owners)


def _columns(parts: list[list[Tensor]], owners: Sequence[int]) -> list[Tensor]:
    return [torch.cat(column) for column in zip(*[parts[rank] for rank in owners], strict=True)]


def _objects(value: Any, comm: Communicator, share: Share | None, owners: Sequence[int]) -> Any:
    problem = _problem([len(value)], share) if isinstance(value, list) else None
    own = _valid(value, share) if isinstance(value, list) and problem is None else value
    everyone = comm.all_gather_json({"problem": problem} if problem is not None else {"value": own})
    _raise_for(problem, [rank for rank, found in enumerate(everyone) if "problem" in found])
    values = [everyone[rank]["value"] for rank in owners]
    if all(isinstance(found, list) for found in values):
        return [item for found in values for item in found]
    return values


def _raise_for(problem: str | None, ranks: list[int]) -> None:
    if problem is not None:
        raise MisuseError(problem)
    if ranks:
        raise MisuseError(f"gather_for_metrics failed on rank {ranks[0]}, whose own error says why")


def _rows(tensor: Tensor, share: Share | None) -> Tensor:
    if tensor.dim():
        return _valid(tensor, share)
    return tensor.reshape(1)[: 0 if share is not None and share.is_filler else 1]


def _problem(lengths: list[int], share: Share | None) -> str | None:
    """Say why rows that are no sample's cannot be told from those that are repeated; None where they can."""
    if share is None or not share.num_repeated:
        return None
    wrong = next((length for length in lengths if length != share.num_samples), None)
    if wrong is None:
        return None
    return (
        f"gather_for_metrics got {wrong} rows from a batch of {share.num_samples} samples, the last "
        f"{share.num_repeated} of which even_batches has repeated: which rows are theirs cannot be told. Gather one "
        "row for each sample, or set even_batches to False"
    )


def _valid(rows: Any, share: Share | None) -> Any:
    """Return the rows of samples that no other rank has, of a tensor or a list."""
    if share is None or not (share.is_filler or share.num_repeated):
        return rows
    return rows[: share.num_valid]


def _is_list_of_values(item: Any) -> bool:
    return type(item) is list and all(isinstance(value, _PLAIN) for value in item)
