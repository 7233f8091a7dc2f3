"""Fingerprints of models, optimizers and other values, and the states of models that transfer their changes."""

from __future__ import annotations

import functools
import types
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from accel_nb.pool.sync.contents.content_kinds import ObjectAttributes, content_of
from accel_nb.pool.sync.contents.long_items import changeable_items
from accel_nb.pool.sync.long_containers import items_content
from accel_nb.pool.sync.objects.module_gradients import gradients_of
from accel_nb.pool.sync.objects.module_hooks import HookKey, module_hook_ids
from accel_nb.pool.sync.objects.object_kinds import (
    attributes_of,
    is_lazy,
    is_loader,
    is_module,
    is_optimizer,
    is_plain_array,
    is_scheduler,
    is_sparse,
    is_tensor,
)
from accel_nb.pool.sync.objects.shared_ids import SharedId, SharedObjects, optimizer_parts
from accel_nb.pool.sync.objects.shared_memory import OwnData, data_of
from accel_nb.pool.sync.objects.user_attributes import (
    attribute_owners,
    can_set_forward,
    tensor_attributes,
    user_attributes,
)
from accel_nb.pool.sync.objects.user_hooks import method_ids, optimizer_hook_ids
from accel_nb.pool.sync.optimizer_states import (
    OptimizerContent,
    attribute_names,
    group_parameters,
    group_sizes,
    hyperparameters,
    keyed_values,
    own_values,
    state_numbers,
    state_tensors,
    wrapped_optimizers,
)
from accel_nb.pool.sync.stream.pickling import copyable_values, digest
from accel_nb.runtime.distributed.held_gradients import gradient_of
from accel_nb.runtime.distributed.sharded import copy_into as fill_tensor
from accel_nb.runtime.distributed.sharded import full_shape, is_sharded, local_shard, shard_number
from accel_nb.runtime.leaf_tensors import is_leaf
from accel_nb.runtime.tensors.module_paths import submodule_at
from accel_nb.runtime.tensors.versions import version_of

_PLAIN = bool | int | float | complex | str | bytes | None


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """A fingerprint of a value.

    If only ``content`` differs from that of another value, one can be updated to the other in place.
    """

    kind: Any
    content: Any

    def can_update(self, before: Fingerprint) -> bool:
        """Return whether a value with the fingerprint ``before`` can be updated to this content in place."""
        return self.kind is not None and self.kind == before.kind


@dataclass(frozen=True, slots=True)
class ModuleContent:
    """The fingerprints of a module's parts that are sent separately."""

    weights: tuple[tuple[Any, ...], TensorChecksums, tuple[bool, ...]]
    """Versions and checksums of the tensors; the flags ``training`` of submodules and ``requires_grad`` of tensors."""
    gradients: tuple[Any, ...]
    attributes: AttributesContent
    hooks: dict[HookKey, int]


@dataclass(frozen=True, slots=True)
class AttributesContent:
    """The names of a module's attributes, each with the path of its owner, and a fingerprint of their values."""

    names: frozenset[tuple[str, str]]
    values: Any


TensorChecksums = tuple[int, ...]
"""Sums of the bits of some tensors, two for each: of whole 64-bit words, and of the bytes after these."""


class Deleted:
    """The value of an attribute that the sender no longer has."""


def fingerprint_of(
    value: Any, namespace: dict[str, Any], shared: SharedObjects, checksums: TensorChecksums | None = None
) -> Fingerprint | None:
    """Return a fingerprint that is equal while the value does not change; None for values compared by identity.

    Objects in ``shared`` have separate fingerprints: here only their identity counts. ``checksums`` are those of a
    module's tensors, if the sender of the tensors has computed them already. Raise errors of pickling.
    """
    if is_module(value):
        tensors = module_tensors(value)
        flags = (*(part.training for part in value.modules()), *(item.requires_grad for item in tensors.values()))
        checksums = tensor_checksums(tensors.values()) if checksums is None else checksums
        weights, gradients = (_versions(tensors.values()), checksums, flags), gradients_of(tensors.items())
        attributes = _attributes_fingerprint(value, namespace, shared)
        content = ModuleContent(
            weights, (*gradients, *tensor_fingerprints(gradients.values())), attributes, module_hook_ids(value)
        )
        return Fingerprint(_structure(value, tensors), content)
    if is_optimizer(value):
        return _optimizer_fingerprint(value, namespace, shared)
    if is_scheduler(value):
        return Fingerprint("scheduler", digest(value.state_dict(), namespace=namespace, shared=shared))
    if is_compared_by_identity(value):
        return None
    found = None if is_loader(value) else content_of(value)
    place = shared.view_of(value) if is_tensor(value) or is_plain_array(value) else None
    if is_tensor(value):
        own = () if place else (value,)  # a view has the content of the object whose memory it uses
        gradient = gradient_of(value) if is_leaf(value) else None
        parts = own if gradient is None else (*own, gradient)
        attributes = tensor_attributes(value)
        code = digest(attributes, namespace=namespace, shared=shared) if attributes else None
        content = (tensor_fingerprints(parts, exact=True), value.requires_grad, code)
        return Fingerprint(("view", place) if place else found[0] if found else None, content)
    if found is None:
        own = shared.pop(id(value), None)
        try:
            return Fingerprint(None, digest(value, namespace=namespace, shared=shared))
        finally:
            if own is not None:
                shared[id(value)] = own
    kind, content = found
    if place:
        return Fingerprint(("view", place), None)
    if items := changeable_items(value):
        return Fingerprint(kind, items_content(content, items, namespace, shared))
    return Fingerprint(kind, digest(content, namespace=namespace, shared=shared))


def outdated_fingerprint(value: Any, known: Fingerprint) -> Fingerprint:
    """Return a fingerprint of a value's kind with a content that equals none, so that all of it is sent again."""
    if is_module(value):
        return Fingerprint(known.kind, replace(known.content, weights=None, gradients=None))
    if is_optimizer(value):
        return Fingerprint(known.kind, replace(known.content, tensors=None))
    return Fingerprint(known.kind, None)


def _optimizer_fingerprint(optimizer: Any, namespace: dict[str, Any], shared: SharedObjects) -> Fingerprint:
    optimizers = wrapped_optimizers(optimizer)
    groups = digest([hyperparameters(item) for item in optimizers], namespace=namespace, shared={})
    numbers = digest(state_numbers(optimizer), namespace=namespace, shared={})
    own = [(own_values(item, namespace, shared), keyed_values(item)) for item in optimizers]
    attributes = digest(own, namespace=namespace, shared=shared)
    hooks, methods = optimizer_hook_ids(optimizer), method_ids(optimizer)
    tensors = tensor_fingerprints(state_tensors(optimizer))
    content = OptimizerContent(
        tensors=tensors,
        numbers=numbers,
        params=group_parameters(optimizer),
        groups=groups,
        names=attribute_names(optimizer),
        attributes=attributes,
        hooks=hooks,
        methods=methods,
        parts=optimizer_parts(optimizer),
    )
    return Fingerprint(group_sizes(optimizer), content)


def is_compared_by_identity(value: Any) -> bool:
    """Return whether a value's content cannot change: numbers, text, imported modules, functions without state, etc."""
    if isinstance(value, type):
        return value.__module__ != "__main__"
    if isinstance(value, types.FunctionType):
        return content_of(value) is None
    return isinstance(
        value,
        str
        | int
        | float
        | complex
        | bytes
        | types.NoneType
        | types.ModuleType
        | types.MethodType
        | types.CellType
        | types.BuiltinFunctionType,
    ) or (callable(value) and (hasattr(type(value), "__code__") or "__code__" in (attributes_of(value) or ())))


def tensor_fingerprints(tensors: Iterable[Any], *, exact: bool = False) -> tuple[Any, ...]:
    """Return a fingerprint of the content of tensors.

    Version counters are not enough: fused optimizers, ``.data`` and NumPy views change a tensor without increasing
    them. Weighted sums of the bits are cheap; ``exact`` computes a CRC of tensors on the CPU instead.
    """
    tensors = list(tensors)
    content = map(_crc, tensors) if exact else tensor_checksums(tensors)
    return (*_versions(tensors), *content)


def tensor_checksums(tensors: Iterable[Any]) -> TensorChecksums:
    """Return the sums of the bits of tensors, or of this rank's shards; zeros for those that are not strided."""
    import torch

    found: list[int] = []
    by_device: dict[Any, tuple[list[int], list[Any]]] = {}
    for tensor in tensors:
        if (flat := _flat_bytes(tensor)) is not None:
            positions, parts = by_device.setdefault(flat.device, ([], []))
            num_whole = flat.numel() // _WORD * _WORD
            if num_whole:
                positions.append(len(found))
                parts.append(flat[:num_whole].view(torch.int64))
            if num_whole < flat.numel():
                positions.append(len(found) + 1)
                parts.append(flat[num_whole:].long())
        found += (0, 0)
    for positions, parts in by_device.values():
        for position, value in zip(positions, _weighted_sums(parts).tolist(), strict=True):  # one read of each device
            found[position] = value
    return tuple(found)


_WORD = 8
"""The bytes of a word: memory is read at full speed in words of 64 bits."""
_NUM_COEFFICIENTS = 2**12
_BLOCK = 61
"""The words of a block: a prime, so that blocks end within the rows of a matrix, whichever columns change places."""


def _weighted_sums(parts: list[Any]) -> Any:
    """Return for each part the sum of its words, each multiplied by a coefficient of its position.

    It changes if rows of a matrix change places. Of many words, only sums of blocks are multiplied, which takes a
    third of the time. All parts are added together: an operation takes longer than the sum of a small tensor.
    """
    import torch

    condensed = [_sums_of_blocks(words) for words in parts]
    sizes = [words.numel() for words in condensed]
    coefficients = _coefficients(condensed[0].device)
    weighted = torch.cat(condensed) * torch.cat([coefficients[:size] for size in sizes])
    ends = torch.tensor(sizes, device=weighted.device).cumsum(0)
    totals = weighted.cumsum(0)[ends - 1]
    return totals.diff(prepend=totals.new_zeros(1))


def _sums_of_blocks(words: Any) -> Any:
    """Return at most one word for each coefficient: the words of a small tensor, or sums of blocks of a large one."""
    import torch

    while words.numel() > _NUM_COEFFICIENTS:
        blocks = words[: words.numel() // _BLOCK * _BLOCK]
        words = torch.cat([blocks.view(-1, _BLOCK).sum(1), words[blocks.numel() :]])
    return words


@functools.cache
def _coefficients(device: Any) -> Any:
    """Return the coefficients: equal in all processes, and random, as words often differ by powers of two only."""
    import torch

    generator = torch.Generator(device="cpu").manual_seed(0)
    limits, size = (-(2**31), 2**31), (_NUM_COEFFICIENTS,)
    return torch.randint(*limits, size, generator=generator, dtype=torch.int64, device="cpu").to(device)


def _versions(tensors: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(
        (version_of(tensor), tuple(local_shard(tensor).shape), str(tensor.dtype), shard_number(tensor))
        for tensor in tensors
    )


def _crc(tensor: Any) -> Any:
    import numpy

    flat = _flat_bytes(tensor)
    if flat is None or not flat.is_cpu:
        return tensor_checksums([tensor])
    return zlib.crc32(numpy.from_dlpack(flat).data)  # `Tensor.numpy` would forbid resizing it


def _flat_bytes(tensor: Any) -> Any:
    """Return the bytes of a tensor, or of this rank's shard, from a whole word on; None if it has none in strides."""
    import torch

    data = local_shard(tensor).detach()
    if data.layout is not torch.strided or data.is_meta or data.is_quantized or not data.numel():
        return None
    if data.is_complex():
        data = torch.view_as_real(data.resolve_conj())
    flat = data.resolve_neg().contiguous().view(-1).view(torch.uint8)
    return flat.clone() if flat.storage_offset() % _WORD else flat


def module_structure(module: Any) -> tuple[Any, ...]:
    """Return the structure of a module: classes, names and shapes, without values and attributes."""
    return _structure(module, module_tensors(module))


def _structure(module: Any, tensors: Mapping[str, Any]) -> tuple[Any, ...]:
    parts = tuple((path, f"{type(part).__module__}.{type(part).__qualname__}") for path, part in module.named_modules())
    values = tuple((path, full_shape(tensor), str(tensor.dtype)) for path, tensor in tensors.items())
    return parts + values + tuple(_further_names(module))


def _further_names(module: Any) -> Iterator[tuple[str, str]]:
    """Yield each further path of a part with several paths, as of tied weights, with the first path of the part."""
    modules, tensors = dict(module.named_modules()), _all_tensors(module)
    first = {id(part): path for path, part in (*modules.items(), *tensors.items())}
    for path, part in modules.items():
        for registry in (part._modules, part._parameters, part._buffers):
            for name, value in registry.items():
                place = f"{path}.{name}" if path else name
                if value is not None and (found := first.get(id(value), place)) != place:
                    yield place, found


def module_tensors(module: Any) -> dict[str, Any]:
    """Return parameters and buffers by path, each tensor once, without those that lazy layers have not created yet."""
    return {path: tensor for path, tensor in _all_tensors(module).items() if not is_lazy(tensor)}


def _all_tensors(module: Any) -> dict[str, Any]:
    return dict(module.named_parameters()) | dict(module.named_buffers())


def _attributes_fingerprint(
    module: Any, namespace: dict[str, Any], shared: Mapping[int, SharedId]
) -> AttributesContent:
    names: list[tuple[str, str]] = []
    plain: list[Any] = []
    other: dict[tuple[str, str], Any] = {}
    for path, own in user_attributes(module).items():
        for name, value in own.items():
            names.append((path, name))
            if isinstance(value, _PLAIN) or (
                isinstance(value, tuple) and all(isinstance(item, _PLAIN) for item in value)
            ):
                plain.append((path, name, repr(value)))
            else:
                other[path, name] = value
    if not other:
        return AttributesContent(frozenset(names), (plain, None))
    try:
        code = digest(other, namespace=namespace, shared=shared)
    except Exception:  # leave out attributes that cannot be copied
        code = digest(copyable_values(other, namespace, shared), namespace=namespace, shared=shared)
    return AttributesContent(frozenset(names), (plain, code))


def module_attributes(
    module: Any,
    namespace: dict[str, Any],
    shared: Mapping[int, SharedId],
    before: AttributesContent,
    paths_before: Mapping[str, str] | None = None,
) -> dict[str, dict[str, Any]]:
    """Return by path the attributes of a module that can be copied, for `set_module_attributes`.

    Those of ``before`` that it no longer has are `Deleted`. ``paths_before`` has, by present path of a part, its path
    in the receiver, if the paths may differ.
    """
    own = user_attributes(module)
    found = {path: copyable_values(values, namespace, shared) for path, values in own.items()}
    names: dict[str | None, list[str]] = {}
    for path, name in before.names:
        names.setdefault(path, []).append(name)
    for path in attribute_owners(module):
        path_before = path if paths_before is None else paths_before.get(path)
        gone = [name for name in names.get(path_before, ()) if name not in own.get(path, ())]
        if gone:
            found.setdefault(path, {}).update(dict.fromkeys(gone, Deleted))
    return found


def set_module_attributes(module: Any, attributes: Mapping[str, Mapping[str, Any]]) -> None:
    """Set and delete attributes; a shared object arrives as a reference, and its changes by its own path."""
    owners = attribute_owners(module)
    for path, own in attributes.items():
        held = vars(owners[path])
        for name, value in own.items():
            if name == "forward" and is_module(owners[path]) and not can_set_forward(owners[path]):
                continue  # a prepared model with another `forward` is sent as a whole instead
            if value is Deleted:
                held.pop(name, None)
            else:
                held[name] = value


def module_state(module: Any) -> dict[str, Any]:
    """Return the state with which `set_module_state` makes another copy of the module equal to this one."""
    tensors = module_tensors(module)
    return {"tensors": {path: OwnData(tensor.detach()) for path, tensor in tensors.items()}, **module_flags(module)}


def module_flags(module: Any) -> dict[str, Any]:
    """Return which tensors of a module require no gradient and which submodules are in evaluation mode."""
    return {
        "frozen": [path for path, tensor in module_tensors(module).items() if not tensor.requires_grad],
        "in_eval_mode": [path for path, part in module.named_modules() if not part.training],
    }


def set_module_state(module: Any, state: Mapping[str, Any], *, must_copy: bool = False) -> None:
    """Copy tensors in place and set the flags ``training`` and ``requires_grad``.

    A tensor of another dtype or size gets the memory of its new value, unless ``must_copy``: other values that arrive
    with it may share that memory.
    """
    import torch

    frozen, in_eval_mode = set(state["frozen"]), set(state["in_eval_mode"])
    with torch.no_grad():
        for path, tensor in _all_tensors(module).items():
            if path in state["tensors"]:
                value = data_of(state["tensors"][path])
                if is_sparse(tensor):
                    _set_sparse(module, path, tensor, value)
                    continue
                if is_lazy(tensor):
                    tensor.materialize(value.shape, dtype=value.dtype)
                if value.dtype != tensor.dtype or value.shape != full_shape(tensor):
                    tensor.grad, tensor.data = None, (value.clone() if must_copy else value).to(tensor.device)
                fill_tensor(tensor, value)
            if is_leaf(tensor) and (tensor.is_floating_point() or tensor.is_complex()):
                tensor.requires_grad_(path not in frozen)
    for path, part in module.named_modules():
        part.training = path not in in_eval_mode


def _set_sparse(module: Any, path: str, tensor: Any, value: Any) -> None:
    """Copy a sparse tensor; one of compressed rows or columns is replaced if the number of its elements differs."""
    import torch

    if tensor.layout is torch.sparse_coo or tensor.values().shape == value.values().shape:
        tensor.copy_(value)
    else:
        owner, _, name = path.rpartition(".")
        setattr(submodule_at(module, owner), name, value)


def is_state_sharded(value: Any) -> bool:
    """Return whether this rank holds only a shard of a module's weights, or of an optimizer's state."""
    tensors = module_tensors(value).values() if is_module(value) else state_tensors(value)
    return any(is_sharded(tensor) for tensor in tensors)


def content_fingerprint(value: Any, namespace: dict[str, Any], shared: Mapping[int, SharedId]) -> Fingerprint | None:
    """Return the fingerprint of an object's attributes that can be copied; None if it is not defined by attributes.

    Of a loader only the user's attributes count: its dataset and its samplers have their own paths.
    """
    found = content_of(value)
    if found is None or not isinstance(found[1], ObjectAttributes):
        return None
    copyable = copyable_values(found[1].values, namespace, shared)
    return Fingerprint(found[0], digest(copyable, namespace=namespace, shared=shared))
