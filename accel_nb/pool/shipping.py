"""What travels with a cell: new names by value, names that both sides hold by what changed in them.

A `Delivery` is written on one side and applied on the other, in either direction. Modules, optimizers and schedulers
that the receiver already holds are changed in place, so that whatever refers to them there stays valid; so are the
containers (list, dict, set, array) that a cell filled.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from accel_nb.errors import ShippingError
from accel_nb.pool.arena import Parcel
from accel_nb.pool.pickling import (
    SharedId,
    digest,
    dump,
    is_module,
    is_optimizer,
    is_scheduler,
    load,
    shared_ids,
)

Namespace = dict[str, Any]


@dataclass(slots=True)
class Delivery:
    """Changes to a namespace: whole values, and parts of objects that the receiver holds."""

    values: dict[str, Any] = field(default_factory=dict)
    modules: dict[str, dict[str, Any]] = field(default_factory=dict)
    optimizers: dict[str, dict[str, Any]] = field(default_factory=dict)
    schedulers: dict[str, dict[str, Any]] = field(default_factory=dict)
    rng: dict[str, Any] | None = None

    def __bool__(self) -> bool:
        return bool(self.values or self.modules or self.optimizers or self.schedulers or self.rng)

    def pack(self, namespace: Namespace, shared: Mapping[int, SharedId]) -> Parcel:
        """Write into an arena; raises what pickling raises."""
        content = (self.values, self.modules, self.optimizers, self.schedulers, self.rng)
        return Parcel.write(*dump(content, namespace=namespace, shared=shared))

    @classmethod
    def unpack(cls, parcel: Parcel, namespace: Namespace) -> Delivery:
        """Read from an arena; references to shared objects are looked up in ``namespace``."""
        stream, buffers = parcel.read()
        return cls(*load(stream, buffers, namespace=namespace))

    def apply(self, namespace: Namespace, *, in_place: bool) -> None:
        """Make the changes; ``in_place`` fills containers that are bound already instead of binding new ones."""
        for name, value in self.values.items():
            if not (in_place and name in namespace and _fill(namespace[name], value)):
                namespace[name] = value
        for name, state in self.modules.items():
            set_module_state(namespace[name], state)
        for name, state in self.optimizers.items():
            set_optimizer_state(namespace[name], state)
        for name, state in self.schedulers.items():
            namespace[name].load_state_dict(state)
        if self.rng is not None:
            from accel_nb.runtime import rng

            rng.restore(self.rng)


@dataclass(slots=True)
class _Entry:
    """What the kernel knows of a name that the workers hold."""

    value: Any
    mark: Any
    only_there: bool = False


class Ledger:
    """The kernel's record of which names the workers hold, and in which version."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}

    def shared(self) -> dict[int, SharedId]:
        """Return the ids of the objects that both sides hold."""
        return shared_ids({name: entry.value for name, entry in self._entries.items() if not entry.only_there})

    def names(self) -> list[str]:
        """Return the names that both sides hold."""
        return [name for name, entry in self._entries.items() if not entry.only_there]

    def prepare(
        self, names: Iterable[str], namespace: Namespace, *, rng: dict[str, Any] | None = None
    ) -> tuple[Parcel, list[str]] | None:
        """Write what the workers lack of ``names`` and return it with the names in it; None when they have it all.

        ``rng`` are generator states to go along. Raises ShippingError naming each name that cannot be copied, why,
        and what to do. Call `record` with the names once they are on their way.
        """
        shared = self.shared()
        delivery = Delivery(rng=rng)
        problems: list[str] = []
        for name in names:
            try:
                self._add(name, namespace, shared, delivery)
            except Exception as error:
                problems.append(_describe_problem(name, namespace[name], error))
        if problems:
            raise ShippingError("\n".join(problems))
        if not delivery:
            return None
        still_shared = {key: shared_id for key, shared_id in shared.items() if shared_id[1] not in delivery.values}
        sent = [*delivery.values, *delivery.modules, *delivery.optimizers, *delivery.schedulers]
        try:
            return delivery.pack(namespace, still_shared), sent
        except Exception as error:
            raise ShippingError(_find_problems(delivery.values, namespace, still_shared, error)) from None

    def record(self, names: Iterable[str], namespace: Namespace) -> None:
        """Note that the workers now hold ``names`` as they are here."""
        shared = self.shared()
        for name in names:
            value = namespace[name]
            self._entries[name] = _Entry(value, _mark(name, value, namespace, shared))

    def record_only_there(self, name: str, namespace: Namespace) -> None:
        """Note that the workers' value of a name is not this side's; it is not overwritten until rebound here."""
        self._entries[name] = _Entry(namespace.get(name), None, only_there=True)

    def forget(self, names: Iterable[str] | None = None) -> None:
        """Drop the record of some names, or of all: they are sent again when next used."""
        for name in list(self._entries) if names is None else names:
            self._entries.pop(name, None)

    def _add(self, name: str, namespace: Namespace, shared: Mapping[int, SharedId], delivery: Delivery) -> None:
        value, entry = namespace[name], self._entries.get(name)
        if entry is None or entry.value is not value:
            delivery.values[name] = value
            return
        if entry.only_there:
            return
        mark = _mark(name, value, namespace, shared)
        if mark == entry.mark:
            return
        if is_module(value) and mark.structure == entry.mark.structure:
            delivery.modules[name] = module_state(value)
        elif is_optimizer(value):
            delivery.optimizers[name] = optimizer_state(value, with_tensors=mark.tensors != entry.mark.tensors)
        elif is_scheduler(value):
            delivery.schedulers[name] = value.state_dict()
        else:
            delivery.values[name] = value


@dataclass(frozen=True, slots=True)
class _ModuleMark:
    structure: tuple[str, ...]
    tensors: tuple[tuple[int, int], ...]
    flags: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class _OptimizerMark:
    groups: bytes
    tensors: tuple[tuple[int, int], ...]


def _mark(name: str, value: Any, namespace: Namespace, shared: Mapping[int, SharedId]) -> Any:
    """Return something that compares equal as long as the value has not changed."""
    if is_module(value):
        tensors = module_tensors(value)
        return _ModuleMark(
            tuple(tensors),
            tuple((id(tensor), tensor._version) for tensor in tensors.values()),
            (*(part.training for part in value.modules()), *(tensor.requires_grad for tensor in tensors.values())),
        )
    if is_optimizer(value):
        return _OptimizerMark(
            digest(_hyperparameters(value), namespace=namespace, shared={}), optimizer_versions(value)
        )
    if is_scheduler(value):
        return digest(value.state_dict(), namespace=namespace, shared={})
    if is_fixed(value):
        return None
    if is_tensor(value):
        return value._version, value.data_ptr()
    others = {key: shared_id for key, shared_id in shared.items() if key != id(value)}
    return digest(value, namespace=namespace, shared=others)


def is_tensor(value: Any) -> bool:
    """Whether the value is a torch tensor, told without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_fixed(value: Any) -> bool:
    """Whether identity says it all: functions, classes and imported modules."""
    return isinstance(value, type | type(sys)) or (callable(value) and hasattr(value, "__code__"))


def module_tensors(module: Any) -> dict[str, Any]:
    """Return parameters and buffers by path, each tensor once."""
    tensors = dict(module.named_parameters())
    tensors.update(module.named_buffers())
    return tensors


def module_state(module: Any) -> dict[str, Any]:
    """Return what `set_module_state` needs to make another copy of a module equal to this one."""
    tensors = module_tensors(module)
    return {
        "tensors": {path: tensor.detach() for path, tensor in tensors.items()},
        "frozen": [path for path, tensor in tensors.items() if not tensor.requires_grad],
        "evaluating": [path for path, part in module.named_modules() if not part.training],
    }


def set_module_state(module: Any, state: Mapping[str, Any]) -> None:
    """Copy tensors in place and set training and gradient flags."""
    import torch

    frozen, evaluating = set(state["frozen"]), set(state["evaluating"])
    with torch.no_grad():
        for path, tensor in module_tensors(module).items():
            if path in state["tensors"]:
                tensor.copy_(state["tensors"][path])
            if tensor.is_leaf and tensor.is_floating_point():
                tensor.requires_grad_(path not in frozen)
    for path, part in module.named_modules():
        part.training = path not in evaluating


def _hyperparameters(optimizer: Any) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def optimizer_versions(optimizer: Any) -> tuple[tuple[int, int], ...]:
    """Return identity and version of every state tensor."""
    return tuple(
        (id(value), value._version)
        for state in optimizer.state.values()
        for value in state.values()
        if is_tensor(value)
    )


def optimizer_bytes(optimizer: Any) -> int:
    """Return the size of the state tensors in bytes."""
    return sum(value.nbytes for state in optimizer.state.values() for value in state.values() if is_tensor(value))


def optimizer_state(optimizer: Any, *, with_tensors: bool) -> dict[str, Any]:
    """Return hyperparameters, and with ``with_tensors`` the state too."""
    return {
        "groups": _hyperparameters(optimizer),
        "state": optimizer.state_dict()["state"] if with_tensors else None,
    }


def set_optimizer_state(optimizer: Any, state: Mapping[str, Any]) -> None:
    """Set hyperparameters in place and, when given, load the state."""
    for group, values in zip(optimizer.param_groups, state["groups"], strict=True):
        group.update(values)
    if state["state"] is not None:
        optimizer.load_state_dict({"state": state["state"], "param_groups": optimizer.state_dict()["param_groups"]})


def _fill(old: Any, new: Any) -> bool:
    """Give a bound container new content in place; False when it has to be bound anew."""
    if type(old) is not type(new) or old is new:
        return False
    if isinstance(old, list):
        old[:] = new
    elif isinstance(old, dict | set):
        old.clear()
        old.update(new)
    elif is_tensor(old) and old.is_leaf and old.shape == new.shape and old.dtype == new.dtype:
        old.data.copy_(new)
    elif type(old).__module__ == "__main__" and hasattr(old, "__dict__") and not is_module(old):
        old.__dict__.clear()
        old.__dict__.update(new.__dict__)
    elif type(old).__name__ == "ndarray" and old.shape == new.shape and old.dtype == new.dtype:
        old[...] = new
    else:
        return False
    return True


def _find_problems(
    values: Mapping[str, Any], namespace: Namespace, shared: Mapping[int, SharedId], error: Exception
) -> str:
    lines: list[str] = []
    for name, value in values.items():
        try:
            dump(value, namespace=namespace, shared=shared)
        except Exception as cause:
            lines.append(_describe_problem(name, value, cause))
    return "\n".join(lines) or f"the names {', '.join(values)} cannot be sent together: {error}"


def _describe_problem(name: str, value: Any, error: Exception) -> str:
    return (
        f"`{name}` ({type(value).__module__}.{type(value).__qualname__}) cannot be sent to the workers: "
        f"{type(error).__name__}: {error}. Make it inside the %%accelerate cell, or leave it out of the cell."
    )
