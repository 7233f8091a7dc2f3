"""References of values to shared objects, and to models, optimizers and schedulers with a name."""

from __future__ import annotations

import types
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from accel_nb.pool.sync.change_detection import is_compared_by_identity
from accel_nb.pool.sync.contents.content_kinds import content_of
from accel_nb.pool.sync.objects.object_kinds import is_module, is_tensor, training_kinds
from accel_nb.pool.sync.objects.shared_ids import SharedObjects, shared_ids
from accel_nb.pool.sync.paths.object_paths import referenced_objects, root_name
from accel_nb.pool.sync.stream.pickling import dump

Namespace = dict[str, Any]
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (dict, OrderedDict, list, set)
_PARTS = ("_modules", "_parameters", "_buffers")


class ReferenceRecorder(SharedObjects):
    """A table of the ids of shared objects, which records the paths that a pickler looks up."""

    def __init__(self, objects: SharedObjects) -> None:
        super().__init__(objects, objects.owners.values())
        self.looked_up: dict[str, None] = {}

    def get(self, key: int, default: Any = None) -> Any:
        """Return the id of an object, and record the lookup."""
        found = super().get(key, default)
        if found is not None:
            self.looked_up[found[1]] = None
        return found

    def look_up_parts(self, value: Any) -> None:
        """Look up the objects that a value refers to: the use of a loader or a bound method may change these."""
        for part in referenced_objects("", value).values():
            self.get(id(part))


def referred_names(names: Iterable[str], visible: Mapping[str, Any], namespace: Namespace) -> list[str]:
    """Return other names than ``names``, of modules, optimizers and schedulers to which values of ``names`` refer.

    These refer to others in turn, as a model whose part has a name of its own. Only names in ``visible`` are returned;
    ``namespace`` is the globals of functions. A trainer object that refers to the notebook's ``model`` trains that
    model: both are sent in one stream that keeps the reference.
    """
    kinds = training_kinds()
    # Filter by type first: in a long session IPython has bound thousands of names. The copy is of one moment: other
    # threads may bind names. An object has the first of its names: IPython's own, as `_`, are of the shell on workers.
    trained = [(name, value) for name, value in dict(namespace).items() if isinstance(value, kinds)]
    trained.sort(key=lambda item: item[0].startswith("_"))
    chosen = set(names)
    others = {name: value for name, value in trained if name not in chosen and name in visible}
    found: dict[str, None] = {}
    waiting: Collection[str] = chosen
    while waiting and others:
        references = ReferenceRecorder(shared_ids(others))
        for name in waiting:
            _look_up(visible[name], references, namespace)
        waiting = dict.fromkeys(root_name(path) for path in references.looked_up)
        found |= dict.fromkeys(waiting)
        others = {name: value for name, value in others.items() if name not in waiting}
    return list(found)


def _look_up(value: Any, references: ReferenceRecorder, namespace: Namespace) -> None:
    """Look up all objects to which a value refers."""
    if is_tensor(value) or (is_compared_by_identity(value) and not isinstance(value, types.MethodType)):
        return
    content: Any = content_of(value) if isinstance(value, types.FunctionType) else None
    if is_module(value):
        content = list(_contents(value, references))
    with suppress(Exception):  # `SharedObjectRegistry.serialize_changes` raises it, with advice
        dump(value if content is None else content, namespace=namespace, shared=references)


def _contents(module: Any, references: ReferenceRecorder) -> Iterator[Any]:
    """Yield the contents of a module and its submodules other than parts and plain values, and look up the parts.

    A model may have thousands of parts, of which nearly all contain only parts: these are not copied.
    """
    seen: set[int] = set()
    waiting = [module]
    while waiting:
        part = waiting.pop()
        if part is None or id(part) in seen or references.get(id(part)) is not None:
            continue
        seen.add(id(part))
        if not is_module(part) or _has_own_reduction(type(part)):
            yield part
            continue
        if type(part).__module__ == "__main__":
            yield type(part)  # its methods may be closures
        own = vars(part)
        for name in _PARTS[1:]:
            for tensor in own[name].values():
                references.get(id(tensor))
                if tensor is not None and (content := _tensor_content(tensor)):
                    yield content
        waiting += own["_modules"].values()
        yield from (item for name, item in own.items() if name not in _PARTS and not _is_plain(item))


def _tensor_content(tensor: Any) -> list[Any]:
    """Return the attributes that the user's code has set on a tensor, and its hooks."""
    found = [vars(tensor), tensor._backward_hooks, tensor._post_accumulate_grad_hooks]
    return [item for item in found if item]


def _has_own_reduction(kind: type) -> bool:
    """Return whether a class of modules changes how `torch.nn.Module` is copied, by its attributes."""
    base = training_kinds()[0]
    return any(
        getattr(kind, name, None) is not getattr(base, name, None)
        for name in ("__reduce_ex__", "__reduce__", "__getstate__")
    )


def _is_plain(item: Any) -> bool:
    """Return whether an attribute refers to no object: a number, a text, an empty container, or a tuple of such."""
    if type(item) is tuple:
        return all(map(_is_plain, item))
    return isinstance(item, _PLAIN) or (type(item) in _CONTAINERS and not item)
