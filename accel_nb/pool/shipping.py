"""What travels with a cell: new names by value, names that both sides hold by what changed in them.

A `Delivery` is written on one side and applied on the other, in either direction. Modules, optimizers and schedulers
that the receiver already holds are changed in place, so that whatever refers to them there stays valid; so are the
containers (list, dict, set, array) that a cell filled.
"""

from __future__ import annotations

import sys
import zlib
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
    changed: dict[str, Any] = field(default_factory=dict)
    """Values that were changed in place: the receiver's own object is given the new content where it can be."""
    modules: dict[str, dict[str, Any]] = field(default_factory=dict)
    optimizers: dict[str, dict[str, Any]] = field(default_factory=dict)
    schedulers: dict[str, dict[str, Any]] = field(default_factory=dict)
    rng: dict[str, Any] | None = None

    def __bool__(self) -> bool:
        return bool(self.values or self.changed or self.modules or self.optimizers or self.schedulers or self.rng)

    def pack(self, namespace: Namespace, shared: Mapping[int, SharedId]) -> Parcel:
        """Write into an arena; raises what pickling raises."""
        content = (self.values, self.changed, self.modules, self.optimizers, self.schedulers, self.rng)
        return Parcel.write(*dump(content, namespace=namespace, shared=shared))

    @classmethod
    def unpack(cls, parcel: Parcel, namespace: Namespace) -> Delivery:
        """Read from an arena; references to shared objects are looked up in ``namespace``."""
        stream, buffers = parcel.read()
        return cls(*load(stream, buffers, namespace=namespace))

    def apply(self, namespace: Namespace) -> None:
        """Make the changes."""
        namespace.update(self.values)
        for name, value in self.changed.items():
            if not (name in namespace and _fill(namespace[name], value)):
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
        if any(self._is_held(name, value) and has_state(value) for name, value in delivery.values.items()):
            # The workers' optimizer refers to the model that is replaced: what refers to it goes along, in one stream.
            self.forget(name for name, entry in list(self._entries.items()) if not entry.only_there)
            return self.prepare(names, namespace, rng=rng)
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

    def _is_held(self, name: str, value: Any) -> bool:
        return name in self._entries and self._entries[name].value is value

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
        elif is_optimizer(value) and mark.sizes == entry.mark.sizes:
            delivery.optimizers[name] = optimizer_state(value, with_tensors=mark.tensors != entry.mark.tensors)
        elif is_scheduler(value):
            delivery.schedulers[name] = value.state_dict()
        else:
            delivery.values[name] = value


@dataclass(frozen=True, slots=True)
class _ModuleMark:
    structure: tuple[Any, ...]
    tensors: tuple[Any, ...]
    flags: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class _OptimizerMark:
    sizes: tuple[int, ...]
    groups: bytes
    tensors: tuple[Any, ...]


def _mark(name: str, value: Any, namespace: Namespace, shared: Mapping[int, SharedId]) -> Any:
    """Return something that compares equal as long as the value has not changed."""
    if is_module(value):
        tensors = module_tensors(value)
        return _ModuleMark(
            module_structure(value),
            tensor_marks(tensors.values()),
            (*(part.training for part in value.modules()), *(tensor.requires_grad for tensor in tensors.values())),
        )
    if is_optimizer(value):
        return _OptimizerMark(
            group_sizes(value),
            digest(hyperparameters(value), namespace=namespace, shared={}),
            tensor_marks(state_tensors(value)),
        )
    if is_scheduler(value):
        return digest(value.state_dict(), namespace=namespace, shared={})
    if is_fixed(value):
        return None
    if is_tensor(value):
        return tensor_marks([value], exact=True)
    others = {key: shared_id for key, shared_id in shared.items() if key != id(value)}
    return digest(value, namespace=namespace, shared=others)


def is_tensor(value: Any) -> bool:
    """Whether the value is a torch tensor, told without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_fixed(value: Any) -> bool:
    """Whether identity says it all: functions, imported modules, and classes from modules."""
    if isinstance(value, type):
        return value.__module__ != "__main__"
    return isinstance(value, type(sys)) or (callable(value) and hasattr(value, "__code__"))


def has_state(value: Any) -> bool:
    """Whether other objects refer to the value's parts, so that it cannot be replaced alone."""
    return is_module(value) or is_optimizer(value)


def tensor_marks(tensors: Iterable[Any], *, exact: bool = False) -> tuple[Any, ...]:
    """Return what changes with the content of tensors.

    Version counters alone do not tell: fused optimizers, ``.data`` and NumPy views change a tensor without counting.
    A sum of the bits costs little beside that; it misses a permutation, so ``exact`` takes a checksum.
    """
    import torch

    marks: list[Any] = []
    sums: dict[Any, list[Any]] = {}
    for tensor in tensors:
        data = tensor.detach()
        marks.append((tensor._version, tuple(data.shape), str(data.dtype)))
        if data.layout is not torch.strided or data.is_meta or data.is_quantized or not data.numel():
            continue
        if data.is_complex():
            data = torch.view_as_real(data.resolve_conj())
        flat = data.resolve_neg().contiguous().view(-1).view(torch.uint8)
        if exact and data.is_cpu:
            marks.append(zlib.crc32(flat.numpy().data))
            continue
        whole = flat[: flat.numel() // 4 * 4]
        parts = sums.setdefault(data.device, [])
        parts.append(whole.view(torch.int32).sum(dtype=torch.int32))
        parts.append(flat[whole.numel() :].sum(dtype=torch.int32))
    return (*marks, *(tuple(torch.stack(parts).tolist()) for parts in sums.values()))


def module_structure(module: Any) -> tuple[Any, ...]:
    """Return what a module is made of, its numbers aside: classes, plain attributes, names and shapes."""
    parts = tuple((path, _class_name(part), _plain_attributes(part)) for path, part in module.named_modules())
    tensors = tuple((path, tuple(tensor.shape), str(tensor.dtype)) for path, tensor in module_tensors(module).items())
    return parts + tensors


def _class_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _plain_attributes(module: Any) -> tuple[tuple[str, str], ...]:
    plain = bool | int | float | str | tuple | None
    return tuple(
        sorted(
            (name, repr(value))
            for name, value in vars(module).items()
            if isinstance(value, plain) and not name.startswith("_") and name != "training"
        )
    )


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


def group_sizes(optimizer: Any) -> tuple[int, ...]:
    """Return how many parameters each group of an optimizer has."""
    return tuple(len(group["params"]) for group in optimizer.param_groups)


def hyperparameters(optimizer: Any) -> list[dict[str, Any]]:
    """Return the optimizer's groups without their parameters."""
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def state_tensors(optimizer: Any) -> list[Any]:
    """Return every tensor of an optimizer's state."""
    return [value for state in optimizer.state.values() for value in state.values() if is_tensor(value)]


def optimizer_bytes(optimizer: Any) -> int:
    """Return the size of the state tensors in bytes."""
    return sum(tensor.nbytes for tensor in state_tensors(optimizer))


def optimizer_state(optimizer: Any, *, with_tensors: bool) -> dict[str, Any]:
    """Return hyperparameters, and with ``with_tensors`` the state too."""
    return {
        "groups": hyperparameters(optimizer),
        "state": optimizer.state_dict()["state"] if with_tensors else None,
    }


def set_optimizer_state(optimizer: Any, state: Mapping[str, Any]) -> None:
    """Set hyperparameters in place and, when given, load the state."""
    for group, values in zip(optimizer.param_groups, state["groups"], strict=True):
        group.update(values)
    if state["state"] is not None:
        optimizer.load_state_dict({"state": state["state"], "param_groups": optimizer.state_dict()["param_groups"]})


class _Watch(dict[int, SharedId]):
    """Notes which of the objects named in it a pickler meets."""

    def __init__(self, ids: Mapping[int, SharedId]) -> None:
        super().__init__(ids)
        self.met: dict[str, None] = {}

    def get(self, key: int, default: Any = None) -> Any:
        """Return the name of an object, and remember that it was asked for."""
        found = super().get(key, default)
        if found is not None:
            self.met[found[1]] = None
        return found


def referred_names(names: Iterable[str], visible: Mapping[str, Any], namespace: Namespace) -> list[str]:
    """Return further names of modules, optimizers and schedulers that the values of ``names`` refer to.

    ``visible`` are the names to choose from, ``namespace`` is the one that functions have as globals. A trainer that
    holds the notebook's ``model`` trains that model: both go, in one stream that keeps them one.
    """
    chosen = set(names)
    others = {name: value for name, value in visible.items() if name not in chosen and _is_trained(value)}
    watch = _Watch(shared_ids(others))
    for name in chosen if others else ():
        value = visible[name]
        if isinstance(value, int | float | str | bytes | type(None)) or is_fixed(value) or is_tensor(value):
            continue
        try:
            dump(value, namespace=namespace, shared=watch)
        except Exception:  # told by `Ledger.prepare`, with the way out
            continue
    return list(watch.met)


def _is_trained(value: Any) -> bool:
    return is_module(value) or is_optimizer(value) or is_scheduler(value)


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
