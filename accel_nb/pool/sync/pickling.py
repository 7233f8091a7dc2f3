"""Serialization of values between kernel and workers, by cloudpickle with five additions.

* The data of tensors and arrays is sent out of band, in the buffers of a payload; what shares memory here does there.
* A function defined in a cell gets the receiving namespace as its globals, so that later bindings take effect.
* Objects that both sides hold (a named model, its parameters and submodules) are sent as references, so that an
  optimizer that is sent later updates the parameters of the receiver's model.
* A number that is the `id` of such an object, or of a tensor or module in the stream, becomes the id that the object
  has on the receiving side: notebooks choose parameters by lists of ids that an earlier cell has made.
* Several values are sent in one stream as sections: objects that they share stay shared, and a section that cannot be
  rebuilt affects only sections that share an object with it.

Both processes run the user's code, and only the engine connects them: no data is unpickled from files or networks.
"""

from __future__ import annotations

import argparse
import copyreg
import functools
import importlib
import io
import itertools
import pickle
import pickletools
import sys
import types
import weakref
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import cloudpickle

from accel_nb.pool.sync.event_writers import is_event_writer, reduce_event_writer
from accel_nb.pool.sync.memory_blocks import MemoryBlock, MemoryBlocks, rebuild_array
from accel_nb.pool.sync.memory_maps import is_memory_map, reduce_memory_map
from accel_nb.pool.sync.module_hooks import FLAGS, HOOKS
from accel_nb.pool.sync.object_kinds import is_module, is_optimizer, is_plain_array, is_scheduler, is_tensor
from accel_nb.pool.sync.object_paths import resolve_path
from accel_nb.pool.sync.optimizer_reduction import reduce_optimizer, reduce_replacement, reduce_scheduler
from accel_nb.pool.sync.parametrized import is_parametrized, reduce_parametrized
from accel_nb.pool.sync.slotted_classes import with_slots
from accel_nb.pool.sync.user_hooks import (
    OPTIMIZER_HOOKS,
    add_gradient_hooks,
    gradient_hooks,
    is_replacement,
)
from accel_nb.runtime.devices.registry import default_type
from accel_nb.runtime.distributed.sharded import full_tensor, is_sharded

Key = TypeVar("Key")

SharedId = tuple[str, str, str]
"""The id of an object that both sides hold: (kind, path from a name, path below it in a module or attribute)."""
ObjectId = tuple[Literal["id"], Any]
"""The `id` of an object: that of a `SharedId`, or of an object in the stream."""


def dump(value: Any, *, namespace: dict[str, Any], shared: Mapping[int, SharedId]) -> tuple[bytes, list[memoryview]]:
    """Return the pickle stream of a value and its out-of-band buffers.

    Raise the error of the value's ``__reduce__`` if it cannot be copied.
    """
    stream, buffers = io.BytesIO(), []
    _Pickler(stream, buffers.append, namespace, shared).dump(value)
    return stream.getvalue(), [buffer.raw() for buffer in buffers]


def load(stream: bytes, buffers: Iterable[memoryview], *, namespace: dict[str, Any]) -> Any:
    """Rebuild a value; references to shared objects are looked up in ``namespace``."""
    return _Unpickler(io.BytesIO(stream), namespace, buffers).load()


_LOWEST_ID = 1 << 32
"""Numbers below are data: Python keeps small objects at higher addresses."""

_SUPPRESS: SharedId = ("constant", "argparse.SUPPRESS", "")
"""The id of a string that argparse distinguishes by identity from equal strings."""


class Trial:
    """Copies values one after another, which shows whether they can be copied and how large the copies are.

    An object that two values contain is copied once, as in one stream of `dump_sections`.
    """

    def __init__(self, namespace: dict[str, Any], shared: Mapping[int, SharedId]) -> None:
        self._namespace, self._shared = namespace, shared
        self.reset()

    def reset(self) -> None:
        """Start anew: an object of earlier values counts again in the next value that contains it."""
        self._stream, self._buffers = io.BytesIO(), list[pickle.PickleBuffer]()
        self._pickler = _Pickler(self._stream, self._buffers.append, self._namespace, self._shared)

    def num_bytes(self, value: Any) -> int:
        """Return the size of a copy, without objects of earlier values. Raise the error of a value's reduction."""
        try:
            self._pickler.dump(value)
        except BaseException:
            self.reset()  # the pickler counts objects as copied that it has copied in part
            raise
        size = self._stream.tell() + sum(buffer.raw().nbytes for buffer in self._buffers)
        self._stream.seek(0)
        self._stream.truncate()
        self._buffers.clear()
        return size


class SectionError(Exception):
    """A value of `dump_sections` cannot be copied; ``key`` identifies it, the cause is the error of its reduction."""

    def __init__(self, key: Any) -> None:
        super().__init__(f"{key!r} cannot be copied")
        self.key = key


def dump_sections(
    values: Mapping[Key, Any],
    *,
    namespace: dict[str, Any],
    shared: Mapping[int, SharedId],
    kept_names: Collection[str] | None = None,
) -> tuple[bytes, list[memoryview]]:
    """Return one stream with a section for each value, and the out-of-band buffers; read by `load_sections`.

    A later section refers to an object of an earlier one instead of repeating it. With ``kept_names``, loading the
    stream also binds the functions and classes of ``namespace`` that a value refers to, under their names, so that the
    receiver can pickle them by reference; names in ``kept_names`` are not rebound. Raise SectionError.
    """
    stream, buffers = io.BytesIO(), []
    pickler = _Pickler(stream, buffers.append, namespace, shared, kept_names=kept_names)
    table: list[tuple[Any, int, int]] = []
    for key, value in values.items():
        start, num_buffers = stream.tell(), len(buffers)
        try:
            pickler.dump(value)
        except Exception as error:  # a value's ``__reduce__`` may raise any error
            raise SectionError(key) from error
        table.append((key, stream.tell() - start, len(buffers) - num_buffers))
    num_bytes = stream.tell()
    stream.write(pickle.dumps(table))
    stream.write(num_bytes.to_bytes(8, "little"))
    return stream.getvalue(), [buffer.raw() for buffer in buffers]


def load_sections(
    stream: bytes, buffers: Sequence[memoryview], *, namespace: dict[str, Any]
) -> tuple[dict[Any, Any], dict[Any, Exception]]:
    """Rebuild the values of `dump_sections`; return them, and by key the errors of those that failed."""
    table: list[tuple[Any, int, int]] = pickle.loads(stream[int.from_bytes(stream[-8:], "little") : -8])
    places = [0, *itertools.accumulate(num_bytes for _, num_bytes, _ in table)]
    values: dict[Any, Any] = {}
    errors: dict[Any, Exception] = {}
    unpickler = _Unpickler(io.BytesIO(stream), namespace, buffers)
    lost: set[int] = set()
    for index, (key, _, _) in enumerate(table):
        try:
            if lost and lost & _references(stream[places[index] : places[index + 1]]):
                raise pickle.UnpicklingError(f"it shares an object with {', '.join(map(_format_key, errors))}")
            values[key] = unpickler.load()
            continue
        except Exception as error:  # rebuilding an object may raise any error
            errors[key] = error
        # The failed unpickler has stopped inside of a section. A new one reads the following sections, with the memo of
        # the sections before. Objects of the failed section must not become part of other values.
        size = sum(_num_memoized(stream[places[i] : places[i + 1]]) for i in range(index))
        rebuilt = unpickler.memo.copy()
        memo: list[Any] = [rebuilt[i] for i in range(size)]
        memo += _constants(stream[places[index] : places[index + 1]], memo, unpickler.find_class)
        lost = {i for i, value in enumerate(memo) if value is _LOST}
        rest = buffers[sum(count for _, _, count in table[: index + 1]) :]
        unpickler = _Unpickler(io.BytesIO(_fill_memo(len(memo)) + stream[places[index + 1] :]), namespace, rest, memo)
        unpickler.load()
    return values, errors


_LOST = object()
"""Placeholder in a memo for an object of a section that could not be rebuilt."""


def _format_key(key: Any) -> str:
    return str(key[-1]) if isinstance(key, tuple) else str(key)


def _references(section: bytes) -> set[Any]:
    """Return the memo indices that a section reads."""
    return {argument for step, argument, _ in pickletools.genops(section) if step.name.endswith("GET")}


def _num_memoized(section: bytes) -> int:
    return sum(step.name == "MEMOIZE" for step, _, _ in pickletools.genops(section))


def _fill_memo(size: int) -> bytes:
    """Return a stream that fills an empty memo with the objects of the persistent ids 0 to ``size - 1``."""
    steps = b"".join(b"J" + place.to_bytes(4, "little") + b"Q\x940" for place in range(size))  # BINPERSID MEMOIZE POP
    return b"\x80\x05" + steps + b"N."


def _constants(section: bytes, memo: Sequence[Any], find_class: Callable[[str, str], Any]) -> list[Any]:
    """Return the objects that a section adds to the memo: strings, bytes and imported objects, else `_LOST`.

    The names of attributes and classes are in the memo too: without them most later sections would be lost too.
    """
    found: list[Any] = []
    pushed: list[Any] = []
    for step, argument, _ in pickletools.genops(section):
        if step.name == "MEMOIZE":
            found.append(pushed[-1])
        elif step.name.endswith("GET"):
            place = int(argument or 0)
            pushed.append(memo[place] if place < len(memo) else found[place - len(memo)])
        elif step.name == "STACK_GLOBAL":
            try:
                pushed.append(find_class(*pushed[-2:]))
            except Exception:  # an object that cannot be imported is lost
                pushed.append(_LOST)
        elif step.name != "FRAME":
            pushed.append(argument if isinstance(argument, str | bytes) else _LOST)
    return found


def digest(value: Any, *, namespace: dict[str, Any], shared: Mapping[int, SharedId]) -> bytes:
    """Return a short fingerprint of a value's content, tensors and arrays included.

    It is valid in this process only: shared objects are included by identity, which does not depend on their paths.
    """
    stream, buffers = io.BytesIO(), []
    _Pickler(stream, buffers.append, namespace, shared, by_identity=True).dump(value)
    code = zlib.crc32(stream.getbuffer())
    for buffer in buffers:
        code = zlib.crc32(buffer.raw(), code)
    return stream.tell().to_bytes(8, "little") + code.to_bytes(4, "little")


def shared_ids(objects: Mapping[str, Any]) -> dict[int, SharedId]:
    """Return ids for ``objects`` (by name) and their parts.

    These are the submodules, parameters and buffers of modules, and the dicts that hold hooks.
    """
    ids: dict[int, SharedId] = {}
    for name, value in objects.items():
        if not has_identity(value):
            continue
        ids.setdefault(id(value), ("name", name, ""))
        if is_module(value):
            for path, part in value.named_modules():
                ids.setdefault(id(part), ("module", name, path))
                for attribute in (*HOOKS, *FLAGS):
                    if (held := vars(part).get(attribute)) is not None:
                        ids.setdefault(id(held), ("hooks", name, f"{path}:{attribute}"))
            for path, part in value.named_parameters():
                ids.setdefault(id(part), ("parameter", name, path))
            for path, part in value.named_buffers():
                ids.setdefault(id(part), ("buffer", name, path))
        elif is_optimizer(value):
            for attribute in OPTIMIZER_HOOKS:
                if attribute in vars(value):
                    ids.setdefault(id(vars(value)[attribute]), ("attribute", name, attribute))
    return ids


def has_identity(value: Any) -> bool:
    """Return whether the identity of a value matters; Python may share equal numbers, strings and tuples.

    Importable functions, classes and modules are the same on both sides anyway.
    """
    if isinstance(value, type | types.FunctionType):
        return value.__module__ == "__main__"
    return not isinstance(value, int | float | complex | str | bytes | tuple | frozenset | types.ModuleType | None)


def _is_imported(module: types.ModuleType) -> bool:
    return sys.modules.get(module.__name__) is module


@functools.cache
def _inverse_transform_type(torch: Any) -> type:
    """Return the class of inverses of `torch.distributions` transforms, whose copies by pickle have no transform."""
    return type(torch.distributions.ExpTransform().inv)


def _invert_transform(transform: Any) -> Any:
    return transform.inv


def _is_rebuilt_by_init(kind: type[BaseException]) -> bool:
    """Return whether pickle calls an exception's own ``__init__`` with ``args``, which may be other arguments."""
    return (
        isinstance(kind.__init__, types.FunctionType)
        and kind.__reduce__ is BaseException.__reduce__
        and kind.__reduce_ex__ is BaseException.__reduce_ex__
        and not issubclass(kind, _WITH_FIELDS)
    )


def _rebuild_code(arguments: tuple[Any, ...], filename: str) -> types.CodeType:
    """Return a code object with the name of its cell, which cloudpickle leaves out since 3.1.3."""
    return types.CodeType(*arguments).replace(co_filename=filename)


def _reduce_cell(cell: types.CellType) -> Any:
    """Reduce a closure's cell; it is created empty and then filled, as it may contain its own function."""
    try:
        state = (cell.cell_contents,)
    except ValueError:  # the cell is empty
        state = None
    return types.CellType, (), state, None, None, _set_cell


def _set_cell(cell: types.CellType, state: tuple[Any]) -> None:
    cell.cell_contents = state[0]


def _rebuild_cached(function: Any, parameters: dict[str, Any], attributes: dict[str, Any]) -> Any:
    """Rebuild a function that has an ``lru_cache``, with an empty cache; pickle would look it up by name."""
    made = functools.lru_cache(**parameters)(function)
    vars(made).update(attributes)
    return made


def _main_namespace() -> dict[str, Any]:
    """Return the namespace of cells in this process."""
    return sys.modules["__main__"].__dict__


class _NamespaceReference(dict[str, Any]):
    """Placeholder for the namespace of cells while a function's globals are pickled."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _main_namespace, ()


def _is_of_ipython(value: Any) -> bool:
    """Return whether a function is defined in IPython, whatever module and name it states."""
    return getattr(value, "__globals__", {}).get("__package__") == "IPython.core"


class _ModuleNamespaceReference(dict[str, Any]):
    """Placeholder for the namespace of an imported module while the globals of a function are pickled."""

    def __init__(self, module: types.ModuleType) -> None:
        super().__init__({"__name__": module.__name__})
        self._module = module

    def __reduce_ex__(self, protocol: Any) -> Any:
        return vars, (self._module,)


def _module_of(namespace: dict[str, Any]) -> types.ModuleType | None:
    """Return the module with this namespace, if other processes can import it."""
    module = sys.modules.get(str(namespace.get("__name__")))
    is_importable = (
        module is not None and module.__name__ != "__main__" and getattr(module, "__spec__", None) is not None
    )
    return module if is_importable and vars(module) is namespace else None


_VARY_WITHIN_TYPE = (
    BaseException,
    type,
    types.FunctionType,
    types.MethodType,
    types.ModuleType,
    weakref.ref,
    functools._lru_cache_wrapper,
)
"""Types whose objects are not all reduced in the same way."""


class _Pickler(cloudpickle.Pickler):
    def __init__(
        self,
        file: io.BytesIO,
        on_buffer: Any,
        namespace: dict[str, Any],
        shared: Mapping[int, SharedId],
        *,
        by_identity: bool = False,
        kept_names: Collection[str] | None = None,
    ) -> None:
        super().__init__(file, protocol=5, buffer_callback=on_buffer)
        # cloudpickle maps the id of a function's globals to a dict: that of the namespace becomes the receiver's.
        self.globals_ref[id(namespace)] = _NamespaceReference()
        self._namespace = namespace
        self._shared = shared
        self._by_identity = by_identity
        self._kept_names = kept_names
        # The notebook sends gradients with a model; workers return its weights only, since that would double the data.
        self._is_returned = kept_names is None
        self._blocks = MemoryBlocks()
        # Types whose objects pickle reduces in its own way: structures may have many thousand objects of few types.
        self._ordinary_types: set[type] = set()
        # By id, the tensors and modules that were sent so far.
        self._sent: dict[int, Any] = {}

    def persistent_id(self, obj: Any) -> SharedId | ObjectId | int | None:
        found = self._shared.get(id(obj))
        if found is None:
            if type(obj) is int and obj >= _LOWEST_ID and not self._by_identity:
                held = self._shared.get(obj) or self._sent.get(obj)
                return None if held is None else ("id", held)
            return _SUPPRESS if obj is argparse.SUPPRESS else None
        return id(obj) if self._by_identity else found

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) in self._ordinary_types:
            return NotImplemented
        if is_tensor(obj) or is_module(obj):
            self._sent[id(obj)] = obj
        if is_plain_array(obj):
            return self._reduce_array(obj)
        if is_memory_map(obj):
            return reduce_memory_map(obj, omits_data=self._is_returned and not self._by_identity)
        torch = sys.modules.get("torch")
        if is_sharded(obj):
            is_parameter = isinstance(obj, torch.nn.Parameter)  # type: ignore[union-attr]
            found = full_tensor(obj)
            return self._reduce_tensor(torch, torch.nn.Parameter(found, obj.requires_grad) if is_parameter else found)  # type: ignore[union-attr]
        if hasattr(type(obj), "_accel_nb_reduce"):
            return obj._accel_nb_reduce()
        if torch is not None and isinstance(obj, torch.Tensor) and type(obj) in (torch.Tensor, torch.nn.Parameter):
            return self._reduce_tensor(torch, obj)
        if torch is not None and isinstance(obj, torch.Generator):
            return _rebuild_generator, (str(obj.device), obj.get_state())
        if isinstance(obj, types.CellType):
            return _reduce_cell(obj)
        if isinstance(obj, types.CodeType):
            reduced = self.dispatch_table[types.CodeType](obj)
            return _rebuild_code, (reduced[1], obj.co_filename)
        # cloudpickle sends the modules that a function uses, but no subclasses, as which `torch.backends.cudnn` is one.
        if isinstance(obj, types.ModuleType) and type(obj) is not types.ModuleType and _is_imported(obj):
            return importlib.import_module, (obj.__name__,)
        if torch is not None and type(obj) is _inverse_transform_type(torch):
            return _invert_transform, (obj.inv,)
        if isinstance(obj, functools._lru_cache_wrapper) and obj.__module__ == "__main__":
            own = {name: value for name, value in vars(obj).items() if name not in ("__wrapped__", "cache_parameters")}
            return _rebuild_cached, (obj.__wrapped__, obj.cache_parameters(), own)
        if isinstance(obj, BaseException) and _is_rebuilt_by_init(type(obj)):
            return copyreg.__newobj__, (type(obj), *obj.args), vars(obj) or None  # type: ignore[attr-defined]
        if is_event_writer(obj):
            return reduce_event_writer(obj)
        if is_scheduler(obj):
            return reduce_scheduler(obj)
        if is_optimizer(obj):
            return reduce_optimizer(obj)
        if isinstance(obj, types.MethodType) and is_optimizer(obj.__self__) and is_replacement(obj):
            return reduce_replacement(obj)
        if type(obj) is weakref.ref and is_optimizer(obj()):
            return weakref.ref, (obj(),)
        if is_parametrized(obj):
            return reduce_parametrized(obj)
        if type(obj).__module__ == "accelerate.accelerator":
            raise TypeError(_PROCESS_BOUND.format(name=type(obj).__name__))
        reduced = super().reducer_override(obj)
        if isinstance(obj, type):
            reduced = with_slots(obj, reduced)
        if reduced is NotImplemented and not (isinstance(obj, _VARY_WITHIN_TYPE) or is_tensor(obj) or is_module(obj)):
            if _probes_attributes(type(obj)) and type(obj) not in self.dispatch_table:
                return _with_own_state(obj.__reduce_ex__(5))
            self._ordinary_types.add(type(obj))
        if self._kept_names is not None and isinstance(obj, type | types.FunctionType) and self._is_named(obj):
            return _with_binding(reduced)
        return reduced

    def _is_named(self, obj: Any) -> bool:
        name = obj.__qualname__
        return obj.__module__ == "__main__" and self._namespace.get(name) is obj and name not in self._kept_names  # type: ignore[operator]

    def _dynamic_function_reduce(self, func: types.FunctionType) -> Any:
        # Decorators of libraries use `functools.wraps`: their function has the user's module, but their own globals.
        module = _module_of(func.__globals__)
        if module is not None:
            self.globals_ref.setdefault(id(func.__globals__), _ModuleNamespaceReference(module))
        make, arguments, state, listed, mapped, _ = super()._dynamic_function_reduce(func)
        # Closure cells are sent: functions that share a variable also share it on the receiving side.
        code, names, *_ = arguments
        plain, slots = state
        # IPython binds a function of its own to ``open`` in a notebook's namespace; workers have that of Python.
        used = {} if module is not None else slots["__globals__"]
        used = {name: value for name, value in used.items() if name != "open" or not _is_of_ipython(value)}
        state = plain, {**slots, "__closure__": None, "__globals__": used}
        return make, (code, names, None, None, func.__closure__), state, listed, mapped, _set_function_state

    def _reduce_array(self, array: Any) -> Any:
        arguments = self._blocks.place_array(array)
        return NotImplemented if arguments is None else (rebuild_array, arguments)

    def _reduce_tensor(self, torch: Any, tensor: Any) -> Any:
        if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
            return tensor.__reduce_ex__(5)
        data = tensor.detach()
        device = "cpu" if data.is_cpu else "worker"
        if not data.is_cpu:
            data = data.cpu()
        held, layout = self._blocks.place_tensor(data)
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        name = str(data.dtype).removeprefix("torch.")
        if not tensor.is_leaf:
            gradient = tensor.grad if tensor.retains_grad else None
            return _rebuild_inner_tensor, (held, name, layout, device, gradient)
        arguments = held, name, layout, tensor.requires_grad, is_parameter, device
        hooks, gradient = gradient_hooks(tensor), None if is_parameter and self._is_returned else tensor.grad
        if gradient is not None and type(gradient) is not torch.Tensor:
            gradient = None
        own = tensor_attributes(tensor)
        if not hooks and gradient is None and not own:
            return _rebuild_tensor, arguments
        return _rebuild_tensor, arguments, (hooks, gradient, own), None, None, _set_tensor_state


def tensor_attributes(tensor: Any) -> dict[str, Any]:
    """Return the attributes that the user's code has set on a tensor."""
    own = vars(tensor)
    if "__getstate__" in own:  # set by a training engine that keeps attributes of its own on parameters
        own = own["__getstate__"]()
    return {name: value for name, value in own.items() if not name.startswith("_accel_nb")}


def _set_tensor_state(tensor: Any, state: tuple[Sequence[tuple[str, Any]], Any, dict[str, Any]]) -> None:
    hooks, tensor.grad, own = state
    vars(tensor).update(own)
    add_gradient_hooks(tensor, hooks)


_WITH_FIELDS = (OSError, ImportError, UnicodeError, SyntaxError, StopIteration, SystemExit, AttributeError, NameError)
"""Exceptions whose built-in ``__init__`` stores arguments outside of ``args``."""

_PROCESS_BOUND = (
    "it holds an {name} of the package accelerate, as a transformers Trainer does, which serves the process and the "
    "devices that it was built for only"
)


def _with_binding(reduced: Any) -> Any:
    """Extend the reduction of a function or class by a step that binds its name in the receiving namespace."""
    if not isinstance(reduced, tuple) or len(reduced) < 6 or reduced[5] is None:
        return reduced
    make, arguments, state, listed, mapped, set_state = reduced
    return make, arguments, (set_state, state), listed, mapped, _set_state_and_bind


def _set_state_and_bind(value: Any, state: tuple[Any, Any]) -> None:
    set_state, own = state
    set_state(value, own)
    _main_namespace()[value.__qualname__] = value


def _probes_attributes(kind: type) -> bool:
    """Return whether pickle, looking for ``__setstate__``, calls a ``__getattr__`` that may need the state."""
    return hasattr(kind, "__getattr__") and not hasattr(kind, "__setstate__")


def _with_own_state(reduced: Any) -> Any:
    """Extend the reduction of an object by a step that sets its state without reading an attribute of the object."""
    if not isinstance(reduced, tuple) or len(reduced) < 3 or reduced[2] is None:
        return reduced
    return *(*reduced, None, None)[:5], _set_own_state


def _set_own_state(value: Any, state: Any) -> None:
    own, slots = state if isinstance(state, tuple) else (state, None)
    if own:
        vars(value).update(own)
    for name, item in (slots or {}).items():
        object.__setattr__(value, name, item)


def _set_function_state(function: types.FunctionType, state: Any) -> None:
    """Set a function's state; of its globals only those that the receiver lacks, which keeps its other globals."""
    plain, slots = state
    missing = {name: value for name, value in slots["__globals__"].items() if name not in function.__globals__}
    cloudpickle.cloudpickle._function_setstate(function, (plain, {**slots, "__globals__": missing}))


def _rebuild_tensor(
    block: MemoryBlock, dtype: str, layout: tuple[Any, Any, Any], requires_grad: bool, is_parameter: bool, device: str
) -> Any:
    import torch

    tensor = torch.empty(0, dtype=getattr(torch, dtype)).set_(block.storage(), *layout)
    if device == "worker":
        tensor = tensor.to(default_type().name)
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_(requires_grad)


def _rebuild_inner_tensor(
    block: MemoryBlock, dtype: str, layout: tuple[Any, Any, Any], device: str, gradient: Any
) -> Any:
    """Return a tensor that was computed with gradients in another process; a backward pass to it is refused."""
    from accel_nb.pool.sync.foreign_graphs import as_computed_elsewhere

    tensor = as_computed_elsewhere(lambda: _rebuild_tensor(block, dtype, layout, False, False, device))
    if gradient is not None:
        tensor.retain_grad()
        tensor.grad = gradient
    return tensor


def _rebuild_generator(device: str, state: Any) -> Any:
    import torch

    generator = torch.Generator(device)
    generator.set_state(state)
    return generator


class _Unpickler(pickle.Unpickler):
    def __init__(
        self,
        file: io.BytesIO,
        namespace: dict[str, Any],
        buffers: Iterable[memoryview],
        memo: Sequence[Any] = (),
    ) -> None:
        super().__init__(file, buffers=buffers)
        self._namespace = namespace
        self._earlier_objects = memo

    def persistent_load(self, pid: SharedId | ObjectId | int) -> Any:
        if isinstance(pid, int):
            return self._earlier_objects[pid]
        if pid == _SUPPRESS:
            return argparse.SUPPRESS
        if len(pid) == 2:
            _, held = pid
            return id(self.persistent_load(held) if isinstance(held, tuple) else held)
        kind, name, path = pid
        value = resolve_path(self._namespace, name)
        if kind == "module":
            return value.get_submodule(path)
        if kind == "parameter":
            return value.get_parameter(path)
        if kind == "buffer":
            return value.get_buffer(path)
        if kind == "attribute":
            return vars(value)[path]
        if kind == "hooks":
            below, _, attribute = path.rpartition(":")
            return vars(value.get_submodule(below))[attribute]
        return value
