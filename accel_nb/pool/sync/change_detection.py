"""Fingerprints of models, optimizers and other values, and the states that are sent to transfer their changes."""

from __future__ import annotations

import copy
import types
import zlib
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from accel_nb.pool.sync.object_kinds import (
    attributes_of,
    is_lazy,
    is_loader,
    is_module,
    is_optimizer,
    is_scheduler,
    is_tensor,
)
from accel_nb.pool.sync.object_paths import content_of, set_content
from accel_nb.pool.sync.pickling import TORCH_PREFIXES, SharedId, digest, dump, tensor_attributes
from accel_nb.runtime.distributed.sharded import copy_into as fill_tensor
from accel_nb.runtime.distributed.sharded import full_shape, full_tensor, is_sharded, local_part, shard_state

_DICTS = (dict, OrderedDict, defaultdict)
_PLAIN = bool | int | float | complex | str | bytes | None
_OPTIMIZER_PACKAGES = ("torch.", "accel_nb.", "builtins", "typing", "abc")
_TORCH_ATTRIBUTES = frozenset(
    {
        "training", "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_is_full_backward_hook",
        "_backward_hooks", "_backward_pre_hooks", "_forward_hooks", "_forward_hooks_with_kwargs",
        "_forward_hooks_always_called", "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_state_dict_hooks",
        "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks", "_version",
        "_compiled_call_impl", "forward",
    }
)  # fmt: skip


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

    weights: tuple[tuple[Any, ...], tuple[bool, ...]]
    """The fingerprints of the tensors; the flags ``training`` of submodules and ``requires_grad`` of tensors."""
    attributes: Any


@dataclass(frozen=True, slots=True)
class OptimizerContent:
    """The fingerprints of an optimizer's parts that are sent separately."""

    tensors: tuple[Any, ...]
    groups: bytes


def fingerprint_of(value: Any, namespace: dict[str, Any], refs: dict[int, SharedId]) -> Fingerprint | None:
    """Return a fingerprint that is equal while the value does not change; None for values compared by identity.

    Objects in ``refs`` have separate fingerprints: here only their identity counts. Raise errors of pickling.
    """
    if is_module(value):
        tensors = module_tensors(value)
        flags = (*(part.training for part in value.modules()), *(item.requires_grad for item in tensors.values()))
        attributes = _attributes_fingerprint(value, namespace, refs)
        return Fingerprint(
            module_structure(value), ModuleContent((tensor_fingerprints(tensors.values()), flags), attributes)
        )
    if is_optimizer(value):
        groups = digest((hyperparameters(value), own_values(value)), namespace=namespace, shared={})
        return Fingerprint(group_sizes(value), OptimizerContent(tensor_fingerprints(state_tensors(value)), groups))
    if is_scheduler(value):
        return Fingerprint("scheduler", digest(value.state_dict(), namespace=namespace, shared={}))
    if is_compared_by_identity(value):
        return None
    found = content_of(value)
    if is_tensor(value):
        parts = [value] if not value.is_leaf or value.grad is None else [value, value.grad]
        return Fingerprint(found[0] if found else None, (tensor_fingerprints(parts, exact=True), value.requires_grad))
    if found is None:
        own = refs.pop(id(value), None)
        try:
            return Fingerprint(None, digest(value, namespace=namespace, shared=refs))
        finally:
            if own is not None:
                refs[id(value)] = own
    kind, content = found
    return Fingerprint(kind, digest(content, namespace=namespace, shared=refs))


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
    them. The sum of the bits is cheap, but equal after a permutation; ``exact`` computes a checksum instead.
    """
    import torch

    fingerprints: list[Any] = []
    sums: dict[Any, list[Any]] = {}
    for tensor in tensors:
        data = local_part(tensor).detach()
        fingerprints.append((tensor._version, tuple(data.shape), str(data.dtype)))
        if data.layout is not torch.strided or data.is_meta or data.is_quantized or not data.numel():
            continue
        if data.is_complex():
            data = torch.view_as_real(data.resolve_conj())
        flat = data.resolve_neg().contiguous().view(-1).view(torch.uint8)
        if exact and data.is_cpu:
            fingerprints.append(zlib.crc32(flat.numpy().data))
            continue
        whole = flat[: flat.numel() // 4 * 4]
        parts = sums.setdefault(data.device, [])
        parts.append(whole.view(torch.int32).sum(dtype=torch.int32))
        parts.append(flat[whole.numel() :].sum(dtype=torch.int32))
    return (*fingerprints, *(tuple(torch.stack(parts).tolist()) for parts in sums.values()))


def module_structure(module: Any) -> tuple[Any, ...]:
    """Return the structure of a module: classes, names and shapes, without values and attributes."""
    parts = tuple((path, f"{type(part).__module__}.{type(part).__qualname__}") for path, part in module.named_modules())
    tensors = tuple((path, full_shape(tensor), str(tensor.dtype)) for path, tensor in module_tensors(module).items())
    return parts + tensors


def module_tensors(module: Any) -> dict[str, Any]:
    """Return parameters and buffers by path, each tensor once, without those that lazy layers have not created yet."""
    return {path: tensor for path, tensor in _all_tensors(module).items() if not is_lazy(tensor)}


def _all_tensors(module: Any) -> dict[str, Any]:
    return dict(module.named_parameters()) | dict(module.named_buffers())


def user_attributes(module: Any) -> dict[str, dict[str, Any]]:
    """Return by path the attributes that the user's code has set on a module, its submodules and its parameters.

    Tensors, submodules, hooks, flags and private attributes of torch's layers are not included.
    """
    found: dict[str, dict[str, Any]] = {}
    for path, part in module.named_modules():
        kinds = [kind for kind in type(part).__mro__ if kind.__module__.startswith("torch.")]
        hides_private = len(kinds) > 1  # a layer of torch, or a subclass of one
        hidden = vars(part).get("_accel_nb_hidden", ())  # attributes that a training engine has set
        own = {
            name: value
            for name, value in vars(part).items()
            if name not in _TORCH_ATTRIBUTES
            and name not in hidden
            and not name.startswith(("_accel_nb", "__composable_api"))
            and not (hides_private and name.startswith("_"))
        }
        if own:
            found[path] = own
    return found | {path: own for path, value in module.named_parameters() if (own := tensor_attributes(value))}


def _attributes_fingerprint(module: Any, namespace: dict[str, Any], refs: Mapping[int, SharedId]) -> Any:
    plain: list[Any] = []
    other: dict[tuple[str, str], Any] = {}
    for path, own in user_attributes(module).items():
        for name, value in own.items():
            if isinstance(value, _PLAIN) or (
                isinstance(value, tuple) and all(isinstance(item, _PLAIN) for item in value)
            ):
                plain.append((path, name, repr(value)))
            else:
                other[path, name] = value
    if not other:
        return tuple(plain), None
    try:
        return tuple(plain), digest(other, namespace=namespace, shared=refs)
    except Exception:  # leave out attributes that cannot be copied
        copied = copyable_values(other, namespace, refs)
        return tuple(plain), digest(copied, namespace=namespace, shared=refs)


def copyable_values(
    values: Mapping[Any, Any], namespace: dict[str, Any], refs: Mapping[int, SharedId]
) -> dict[Any, Any]:
    """Return the values that can be copied."""
    copyable: dict[Any, Any] = {}
    for key, value in values.items():
        try:
            dump(value, namespace=namespace, shared=refs)
        except Exception:  # such as a lock, a file or a generator
            continue
        copyable[key] = value
    return copyable


def module_attributes(
    module: Any, namespace: dict[str, Any], refs: Mapping[int, SharedId]
) -> dict[str, dict[str, Any]]:
    """Return by path the attributes of a module that can be copied, for `set_module_attributes`."""
    return {path: copyable_values(own, namespace, refs) for path, own in user_attributes(module).items()}


def set_module_attributes(module: Any, attributes: Mapping[str, Mapping[str, Any]]) -> None:
    """Set attributes; existing containers and tensors are updated in place, so that references stay valid."""
    weights = {_storage(tensor) for tensor in module_tensors(module).values()}
    parts = dict(module.named_modules()) | dict(module.named_parameters())
    for path, own in attributes.items():
        part = parts[path]
        for name, value in own.items():
            _set_attribute(part, name, value, weights)


def _set_attribute(owner: Any, name: str, value: Any, weights: set[int | None] | frozenset[int] = frozenset()) -> None:
    """Set an attribute, in place if possible; ``weights`` are the storages that may not be changed so."""
    current = vars(owner).get(name)
    if current is value:
        return
    old, new = content_of(current), content_of(value)
    if old is not None and new is not None and old[0] == new[0] and not _is_stale_alias(current, value, set(weights)):
        set_content(current, new[1])
    else:
        setattr(owner, name, value)


def _is_stale_alias(current: Any, value: Any, weights: set[int | None]) -> bool:
    """Return whether a tensor attribute shares memory with the module's weights, but its new value differs from them.

    ``weights`` are the addresses of the weights, which have their new values already. `torch.nn.utils.spectral_norm`
    binds ``weight`` to the memory of ``weight_orig`` until the first forward: an attribute that shares the memory of
    the weights and differs from its new value must be replaced.
    """
    import torch

    return (
        is_tensor(current)
        and _storage(current) in weights - {None}
        and not torch.equal(current.detach(), value.detach())
    )


def _storage(tensor: Any) -> int | None:
    """Return the address of a tensor's memory; None for sharded, meta and non-strided tensors."""
    import torch

    if is_sharded(tensor) or tensor.is_meta or tensor.layout is not torch.strided:
        return None
    return tensor.untyped_storage().data_ptr()


def module_state(module: Any) -> dict[str, Any]:
    """Return the state with which `set_module_state` makes another copy of the module equal to this one."""
    tensors = module_tensors(module)
    return {"tensors": {path: tensor.detach() for path, tensor in tensors.items()}, **module_flags(module)}


def module_flags(module: Any) -> dict[str, Any]:
    """Return which tensors of a module require no gradient and which submodules are in evaluation mode."""
    return {
        "frozen": [path for path, tensor in module_tensors(module).items() if not tensor.requires_grad],
        "evaluating": [path for path, part in module.named_modules() if not part.training],
    }


def set_module_state(module: Any, state: Mapping[str, Any]) -> None:
    """Copy tensors in place and set the flags ``training`` and ``requires_grad``."""
    import torch

    frozen, evaluating = set(state["frozen"]), set(state["evaluating"])
    with torch.no_grad():
        for path, tensor in _all_tensors(module).items():
            if path in state["tensors"]:
                value = state["tensors"][path]
                if is_lazy(tensor):
                    tensor.materialize(value.shape, dtype=value.dtype)
                if value.dtype != tensor.dtype or value.shape != full_shape(tensor):
                    tensor.grad, tensor.data = None, torch.empty_like(value, device=tensor.device)
                fill_tensor(tensor, value)
            if tensor.is_leaf and tensor.is_floating_point():
                tensor.requires_grad_(path not in frozen)
    for path, part in module.named_modules():
        part.training = path not in evaluating


def is_state_sharded(value: Any) -> bool:
    """Return whether this rank holds only a shard of a module's weights, or of an optimizer's state."""
    tensors = module_tensors(value).values() if is_module(value) else state_tensors(value)
    return any(is_sharded(tensor) for tensor in tensors)


def group_sizes(optimizer: Any) -> tuple[int, ...]:
    """Return how many parameters each group of an optimizer has."""
    return tuple(len(group["params"]) for group in optimizer.param_groups)


def hyperparameters(optimizer: Any) -> list[dict[str, Any]]:
    """Return the optimizer's groups without their parameters."""
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def state_tensors(optimizer: Any) -> list[Any]:
    """Return every tensor of an optimizer's state."""
    own = [value for state in optimizer.state.values() for value in state.values() if is_tensor(value)]
    return own + [tensor for _, item in inner_optimizers(optimizer) for tensor in state_tensors(item)]


def optimizer_bytes(optimizer: Any) -> int:
    """Return the size of the state tensors in bytes."""
    return sum(tensor.nbytes for tensor in state_tensors(optimizer))


def optimizer_state(
    optimizer: Any, *, with_tensors: bool, sizes_before: tuple[int, ...] | None = None
) -> dict[str, Any]:
    """Return hyperparameters; if ``with_tensors`` also the state of the parameters, and `own_values`.

    ``sizes_before`` are the `group_sizes` of the other optimizer, which receives the parameters of other groups too.
    """
    kept = optimizer.state_dict()["state"] if with_tensors else None
    if kept is not None:
        kept = {key: {name: full_tensor(value) for name, value in values.items()} for key, values in kept.items()}
    own = {} if kept is None else own_values(optimizer)
    inner = {name: optimizer_state(item, with_tensors=with_tensors) for name, item in inner_optimizers(optimizer)}
    known = group_sizes(optimizer) if sizes_before is None else sizes_before
    params = [
        None if known[number : number + 1] == (len(group["params"]),) else group["params"]
        for number, group in enumerate(optimizer.param_groups)
    ]
    return {"groups": hyperparameters(optimizer), "params": params, "state": kept, "own": own, "inner": inner}


def inner_optimizers(optimizer: Any) -> list[tuple[str, Any]]:
    """Return by attribute the optimizers that an optimizer wraps, as SAM does."""
    return [(name, item) for name, item in vars(optimizer).items() if is_optimizer(item) and item is not optimizer]


def set_optimizer_state(optimizer: Any, state: Mapping[str, Any]) -> None:
    """Set hyperparameters and own values in place, and load the state of the parameters if it is given."""
    groups = optimizer.param_groups
    del groups[len(state["params"]) :]
    groups += [{} for _ in state["params"][len(groups) :]]
    for group, params in zip(groups, state["params"], strict=True):
        if params is not None:
            group["params"] = params
    for name, value in state["own"].items():
        _set_attribute(optimizer, name, _with_keys(value, dict(enumerate(_parameters(optimizer)))))
    for group, values in zip(groups, state["groups"], strict=True):
        group.update(values)
    if state["state"] is not None:
        parameters = _parameters(optimizer)
        # A wrapper may not have called `Optimizer.__init__`: this adds the attributes that torch needs.
        _optimizer_class().__setstate__(optimizer, {})
        own = {key: shard_state(values, parameters[key]) for key, values in state["state"].items()}
        groups, kept = optimizer.param_groups, optimizer.state
        optimizer.load_state_dict({"state": own, "param_groups": optimizer.state_dict()["param_groups"]})
        if not _loads_state_itself(optimizer):
            _restore_containers(optimizer, groups, kept)
    for name, item in inner_optimizers(optimizer):
        set_optimizer_state(item, state["inner"][name])


def own_values(optimizer: Any) -> dict[str, Any]:
    """Return the data among the attributes of an optimizer of a class that is not torch's, such as a count of steps.

    Data are plain values, tensors that require no gradients, and containers of these. A parameter that is the key of a
    dict is returned as its `ParameterIndex`.
    """
    if all(kind.__module__.startswith(_OPTIMIZER_PACKAGES) for kind in type(optimizer).__mro__):
        return {}
    indices = {value: ParameterIndex(number) for number, value in enumerate(_parameters(optimizer))}
    return {
        name: _with_keys(value, indices)
        for name, value in vars(optimizer).items()
        if name not in ("state", "param_groups", "defaults")
        and not name.startswith(("_accel_nb", *TORCH_PREFIXES))
        and _is_data(value, indices)
    }


class ParameterIndex(int):
    """The index of a parameter among those of its optimizer."""


def _parameters(optimizer: Any) -> list[Any]:
    return [value for group in optimizer.param_groups for value in group["params"]]


def _is_data(value: Any, parameters: Mapping[Any, Any]) -> bool:
    if is_tensor(value):
        return not value.requires_grad and not is_sharded(value)
    if type(value) in _DICTS:
        return all(
            (isinstance(key, _PLAIN) or (is_tensor(key) and key in parameters)) and _is_data(item, parameters)
            for key, item in value.items()
        )
    return isinstance(value, _PLAIN) or (
        type(value) in (list, tuple) and all(_is_data(item, parameters) for item in value)
    )


def _with_keys(value: Any, other: Mapping[Any, Any]) -> Any:
    """Return data in which the keys of dicts are replaced: parameters by their indices, or indices by parameters."""
    if type(value) in _DICTS:
        found = copy.copy(value)
        found.clear()
        for key, item in value.items():
            is_index = is_tensor(key) or type(key) is ParameterIndex
            found[other[key] if is_index else key] = _with_keys(item, other)
        return found
    return type(value)(_with_keys(item, other) for item in value) if type(value) in (list, tuple) else value


def _optimizer_class() -> Any:
    import torch

    return torch.optim.Optimizer


def _loads_state_itself(optimizer: Any) -> bool:
    return type(optimizer).load_state_dict is not _optimizer_class().load_state_dict


def _restore_containers(optimizer: Any, groups: list[dict[str, Any]], state: dict[Any, Any]) -> None:
    """Put what torch has loaded back into the optimizer's own list of groups and state, to which others may refer.

    A wrapper such as SAM or Lookahead has the groups and the state of the optimizer that it wraps.
    """
    for group, loaded in zip(groups, optimizer.param_groups, strict=True):
        group.update({key: value for key, value in loaded.items() if key != "params"})
    if optimizer.state is not state:
        loaded_state = dict(optimizer.state)
        state.clear()
        state.update(loaded_state)
    optimizer.param_groups, optimizer.state = groups, state


def is_untracked(value: Any) -> bool:
    """Return whether workers ignore changes inside of a value; what a loader reads by has its own paths."""
    return is_loader(value) or is_compared_by_identity(value)
