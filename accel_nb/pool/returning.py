"""What comes back from a cell: on rank 0, find and pack what changed; in the kernel, apply it.

Weights of modules go through an arena that is kept, each tensor copied in place on either side; everything else is a
`Delivery`. What is large or cannot be copied stays on the workers and is named with the reason.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from accel_nb.pool.arena import Parcel, ReturnArena
from accel_nb.pool.pickling import SharedId, digest, dump, is_loader, is_module, is_optimizer, is_scheduler, shared_ids
from accel_nb.pool.shipping import (
    Delivery,
    Namespace,
    group_sizes,
    hyperparameters,
    is_fixed,
    is_tensor,
    module_structure,
    module_tensors,
    optimizer_bytes,
    optimizer_state,
    set_module_state,
    state_tensors,
    tensor_marks,
)

LARGE_BYTES = 64 * 1024 * 1024
"""A value of more bytes stays on the workers unless it is asked for; the weights of modules always come back."""

_ALIGN = 64


@dataclass(slots=True)
class Snapshot:
    """What a namespace held before a cell ran, so that changes can be told afterwards."""

    bound: dict[str, Any]
    marks: dict[str, Any]

    @classmethod
    def take(cls, namespace: Namespace, used: Iterable[str]) -> Snapshot:
        """Remember every binding, and the content of the names that the cell uses."""
        return cls(dict(namespace), {name: _content(namespace[name], namespace) for name in used if name in namespace})


@dataclass(slots=True)
class Parcels:
    """A reply's share of the return: the JSON part, and the descriptors that go with it."""

    body: dict[str, Any]
    descriptors: list[int] = field(default_factory=list)


class Returner:
    """Rank 0's side; keeps the arena between cells."""

    def __init__(self) -> None:
        self._arena: ReturnArena | None = None

    def collect(
        self,
        namespace: Namespace,
        before: Snapshot,
        *,
        shared_names: Collection[str],
        hidden: Callable[[str, Any], bool],
        wanted: Collection[str] = (),
        rng: dict[str, Any] | None = None,
    ) -> Parcels:
        """Pack what the cell bound or changed. ``wanted`` names come back however large they are.

        ``shared_names`` are those that the kernel holds too; what ``hidden`` says yes to is never returned.
        """
        delivery, weights, kept = Delivery(rng=rng), {}, {}
        shared = shared_ids({name: before.bound[name] for name in shared_names if name in before.bound})
        for name, value in namespace.items():
            if hidden(name, value):
                continue
            is_wanted = name in wanted
            is_bound = name not in before.bound or before.bound[name] is not value
            if is_bound or (is_wanted and name not in shared_names):
                reason = _try_value(value, namespace, shared, None if is_wanted else LARGE_BYTES)
                if reason is None:
                    delivery.values[name] = value
                else:
                    kept[name] = reason
            elif is_wanted or (name in before.marks and before.marks[name] != _content(value, namespace)):
                before_mark = before.marks.get(name)
                self._add_change(name, value, namespace, shared, delivery, weights, kept, before_mark, is_wanted)
        # Of an object that was changed and goes back whole, the kernel's parts are not those that it has here.
        whole = {name for name, value in delivery.values.items() if before.bound.get(name) is value}
        shared = {key: item for key, item in shared.items() if item[1] not in whole}
        return self._pack(delivery, weights, kept, namespace, shared)

    def close(self) -> None:
        """Free the arena."""
        if self._arena is not None:
            self._arena.close()
            self._arena = None

    def _add_change(
        self,
        name: str,
        value: Any,
        namespace: Namespace,
        shared: Mapping[int, SharedId],
        delivery: Delivery,
        weights: dict[str, Any],
        kept: dict[str, str],
        before: Any,
        is_wanted: bool,
    ) -> None:
        is_same_kind = before is None or _kind(before) == _kind(_content(value, namespace))
        if is_module(value) and is_same_kind:
            weights[name] = value
        elif is_optimizer(value) and is_same_kind:
            fits = is_wanted or optimizer_bytes(value) <= LARGE_BYTES
            delivery.optimizers[name] = optimizer_state(value, with_tensors=fits)
            if not fits:
                kept[name] = f"its state of {_size(optimizer_bytes(value))} is large"
        elif is_scheduler(value):
            delivery.schedulers[name] = value.state_dict()
        else:
            others = {key: shared_id for key, shared_id in shared.items() if key != id(value)}
            reason = _try_value(value, namespace, others, None if is_wanted else LARGE_BYTES)
            if reason is not None:
                kept[name] = reason
            elif is_same_kind:
                delivery.changed[name] = value
            else:
                delivery.values[name] = value

    def _pack(
        self,
        delivery: Delivery,
        modules: Mapping[str, Any],
        kept: Mapping[str, str],
        namespace: Namespace,
        shared: Mapping[int, SharedId],
    ) -> Parcels:
        parcels = Parcels({"kept": dict(kept), "weights": {}, "parcel": None, "arena": None})
        if delivery:
            outside = {
                key: item
                for key, item in shared.items()
                if not (item[0] == "name" and item[1] in (delivery.values | delivery.changed))
            }
            parcel = delivery.pack(namespace, outside)
            parcels.body["parcel"] = parcel.table()
            parcels.descriptors.append(parcel.descriptor)
        if modules:
            parcels.body["weights"] = self._write_weights(modules)
            assert self._arena is not None
            parcels.body["arena"] = self._arena.num_bytes
            parcels.descriptors.append(os.dup(self._arena.descriptor))
        return parcels

    def _write_weights(self, modules: Mapping[str, Any]) -> dict[str, Any]:
        """Copy each tensor once into the arena and return where it lies."""
        import torch

        places: dict[int, int] = {}
        offset = 0
        for module in modules.values():
            for tensor in module_tensors(module).values():
                if id(tensor) not in places:
                    places[id(tensor)] = offset
                    offset += (tensor.nbytes + _ALIGN - 1) // _ALIGN * _ALIGN
        if self._arena is None or self._arena.num_bytes < offset:
            self.close()
            self._arena = ReturnArena.create(offset)
        tables: dict[str, Any] = {}
        with torch.no_grad():
            for name, module in modules.items():
                entries = []
                for path, tensor in module_tensors(module).items():
                    place = places[id(tensor)]
                    dtype = str(tensor.dtype).removeprefix("torch.")
                    view_tensor(self._arena, place, tensor.nbytes, dtype, list(tensor.shape)).copy_(tensor)
                    entries.append([path, place, dtype, list(tensor.shape)])
                tables[name] = {
                    "entries": entries,
                    "frozen": [path for path, tensor in module_tensors(module).items() if not tensor.requires_grad],
                    "evaluating": [path for path, part in module.named_modules() if not part.training],
                }
        return tables


class Receiver:
    """The kernel's side; keeps its mapping of the worker's arena between cells."""

    def __init__(self) -> None:
        self._arena: ReturnArena | None = None
        self._identity: tuple[int, int] | None = None
        self.rng: dict[str, Any] | None = None
        """The generator states that came back last: as long as the kernel's are these, they need not be sent."""

    def receive(self, body: Mapping[str, Any], descriptors: Iterable[int], namespace: Namespace) -> list[str]:
        """Apply what came back and return the names that now hold the workers' values. Closes the descriptors."""
        remaining = list(descriptors)
        try:
            return self._receive(body, remaining, namespace)
        finally:
            for descriptor in remaining:
                os.close(descriptor)

    def _receive(self, body: Mapping[str, Any], remaining: list[int], namespace: Namespace) -> list[str]:
        names: list[str] = []
        if body["parcel"] is not None:
            parcel = Parcel.from_table(remaining.pop(0), body["parcel"])
            try:
                delivery = Delivery.unpack(parcel, namespace)
            finally:
                parcel.close()
            delivery.apply(namespace)
            names += [*delivery.values, *delivery.changed, *delivery.optimizers, *delivery.schedulers]
            self.rng = delivery.rng
        if body["arena"] is not None:
            self._map(remaining.pop(0))
            for name, table in body["weights"].items():
                self._copy_weights(namespace[name], table)
                names.append(name)
        return names

    def close(self) -> None:
        """Unmap the arena, and forget which random numbers the workers were at."""
        self.rng = None
        if self._arena is not None:
            self._arena.close()
            self._arena = self._identity = None

    def _map(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        if self._identity == (status.st_dev, status.st_ino):
            os.close(descriptor)
            return
        self.close()
        self._arena, self._identity = ReturnArena(descriptor), (status.st_dev, status.st_ino)

    def _copy_weights(self, module: Any, table: Mapping[str, Any]) -> None:
        import torch

        assert self._arena is not None
        tensors = {}
        for path, place, dtype, shape in table["entries"]:
            num_bytes = getattr(torch, dtype).itemsize
            for size in shape:
                num_bytes *= size
            if place < 0 or place + num_bytes > self._arena.num_bytes:
                raise ValueError(f"the weights of {path!r} lie outside of the arena")
            tensors[path] = view_tensor(self._arena, place, num_bytes, dtype, shape)
        set_module_state(module, {"tensors": tensors, "frozen": table["frozen"], "evaluating": table["evaluating"]})


def view_tensor(arena: ReturnArena, place: int, num_bytes: int, dtype: str, shape: list[int]) -> Any:
    """Return a tensor over a part of the arena; no copy."""
    import torch

    kind = getattr(torch, dtype)
    if num_bytes == 0:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(arena.memory, dtype=torch.uint8, count=num_bytes, offset=place).view(kind).view(shape)


@dataclass(frozen=True, slots=True)
class _Content:
    """What a value held: ``kind`` changes when it cannot be brought up to date in place, ``mark`` with its content."""

    kind: Any
    mark: Any


def _kind(content: Any) -> Any:
    return content.kind if isinstance(content, _Content) else None


def _content(value: Any, namespace: Namespace) -> _Content | None:
    """Return something that changes when a cell changes the value in place; None for what is not looked into."""
    if is_module(value):
        tensors = module_tensors(value).values()
        flags = (*(part.training for part in value.modules()), *(tensor.requires_grad for tensor in tensors))
        return _Content(module_structure(value), (tensor_marks(tensors), flags))
    if is_optimizer(value):
        groups = digest(hyperparameters(value), namespace=namespace, shared={})
        return _Content(group_sizes(value), (tensor_marks(state_tensors(value)), groups))
    if is_scheduler(value):
        return _Content(None, digest(value.state_dict(), namespace=namespace, shared={}))
    if is_tensor(value):
        return _Content(None, tensor_marks([value], exact=True))
    if is_loader(value) or is_fixed(value) or isinstance(value, str | int | float | complex | bytes | type(None)):
        return None
    try:
        return _Content(None, digest(value, namespace=namespace, shared={}))
    except Exception:  # what cannot be copied cannot come back: it is not watched
        return None


def _try_value(value: Any, namespace: Namespace, shared: Mapping[int, SharedId], limit: int | None) -> str | None:
    """Return None if a value can come back, else the reason why not."""
    try:
        stream, buffers = dump(value, namespace=namespace, shared=shared)
    except Exception as error:
        return f"{type(value).__qualname__} cannot be copied ({type(error).__name__})"
    size = len(stream) + sum(buffer.nbytes for buffer in buffers)
    if limit is not None and size > limit and not is_module(value):
        return f"{_size(size)} is large"
    return None


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.0f} MB" if num_bytes < 1e9 else f"{num_bytes / 1e9:.1f} GB"
