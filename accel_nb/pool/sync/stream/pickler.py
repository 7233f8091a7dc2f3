"""The pickler and the unpickler of values between kernel and workers; `pool.sync.stream.pickling` describes them."""

from __future__ import annotations

import argparse
import copyreg
import functools
import importlib
import io
import operator
import pickle
import sys
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import cloudpickle

from accel_nb.pool.sync.objects.object_kinds import (
    attributes_of,
    is_data_parallel,
    is_loader,
    is_module,
    is_optimizer,
    is_plain_array,
    is_scheduler,
    is_tensor,
)
from accel_nb.pool.sync.objects.shared_ids import (
    IMPORTED,
    ITEM,
    OUTDATED,
    ObjectId,
    SharedId,
    SharedObjects,
    resolve_state_part,
)
from accel_nb.pool.sync.objects.shared_memory import OwnData
from accel_nb.pool.sync.objects.user_hooks import gradient_hook_dict, is_hook_handle, is_replacement, reduce_hook_handle
from accel_nb.pool.sync.paths.object_paths import changeable_items, is_replaced_whole, resolve_path
from accel_nb.pool.sync.reductions.cell_classes import reduce_class
from accel_nb.pool.sync.reductions.class_bodies import with_members_of_the_body
from accel_nb.pool.sync.reductions.custom_operators import is_custom_operator, reduce_custom_operator
from accel_nb.pool.sync.reductions.event_writers import is_event_writer, reduce_event_writer
from accel_nb.pool.sync.reductions.function_reduction import (
    ModuleNamespaceReference,
    NamespaceReference,
    is_of_ipython,
    module_of,
    rebuild_cached,
    rebuild_code,
    reduce_cell,
    set_function_state,
    with_binding,
)
from accel_nb.pool.sync.reductions.hdf5_objects import is_hdf5_object, reduce_hdf5_object
from accel_nb.pool.sync.reductions.iterators import (
    is_generator_iterator,
    is_loader_iterator,
    reduce_generator_iterator,
    reduce_loader_iterator,
)
from accel_nb.pool.sync.reductions.loader_state import has_started_workers, reduce_loader
from accel_nb.pool.sync.reductions.locks import is_lock, reduce_lock
from accel_nb.pool.sync.reductions.memory_blocks import MemoryBlocks, rebuild_array
from accel_nb.pool.sync.reductions.memory_maps import is_memory_map, reduce_memory_map
from accel_nb.pool.sync.reductions.memory_views import reduce_memory_view
from accel_nb.pool.sync.reductions.module_constants import constants_of
from accel_nb.pool.sync.reductions.object_reduction import (
    adds_items_itself,
    inverse_transform_type,
    is_made_with_arguments,
    is_rebuilt_by_init,
    may_change_itself,
    probes_attributes,
    reduce_by_class,
    reduce_inverse,
    reduce_unchanged,
    reduce_with_items,
    reduce_without_new,
    with_own_state,
)
from accel_nb.pool.sync.reductions.open_files import is_any_file, is_csv_writer, reduce_csv_writer, reduce_file
from accel_nb.pool.sync.reductions.optimizer_reduction import reduce_optimizer, reduce_replacement, reduce_scheduler
from accel_nb.pool.sync.reductions.parametrized import is_parametrized, reduce_parametrized
from accel_nb.pool.sync.reductions.patched_classes import reduce_patched_class
from accel_nb.pool.sync.reductions.process_objects import has_type_of_process, is_of_process, reduce_of_process
from accel_nb.pool.sync.reductions.tensor_reduction import (
    reduce_data,
    reduce_generator,
    reduce_sharded_view,
    reduce_tensor,
)
from accel_nb.pool.sync.reductions.weak_collections import is_weak_collection, reduce_weak_collection
from accel_nb.pool.sync.reductions.widgets import is_widget, reduce_widget
from accel_nb.pool.sync.stream.small_data import Checksums
from accel_nb.runtime.distributed.sharded import can_read_full, full_tensor, gathered_from, is_sharded
from accel_nb.runtime.tensors.instance_patching import innermost_class
from accel_nb.runtime.tensors.module_paths import buffer_at, parameter_at, submodule_at

_LOWEST_ID = 1 << 32
"""Numbers below are data: Python keeps small objects at higher addresses."""


_LONGEST_NAME, _MAX_NAMES = 20, 1000
"""Longer texts, and texts beyond so many in a stream, are data: to intern one costs a call."""


_SUPPRESS: SharedId = ("constant", "argparse.SUPPRESS", "")
"""The id of a string that argparse distinguishes by identity from equal strings."""


_PROCESS_BOUND = (
    "it holds an {name} of the package accelerate, as a transformers Trainer does, which serves the process and the "
    "devices that it was built for only"
)


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


def _is_trained(value: Any) -> bool:
    """Return whether a value is an object of training, which others hold too: a weak reference does not keep it."""
    return is_tensor(value) or is_module(value) or is_optimizer(value)


def _is_imported(module: types.ModuleType) -> bool:
    return sys.modules.get(module.__name__) is module


class _Reductions(dict[type, Callable[[Any], Any]]):
    """cloudpickle's reductions by type, with those of `copyreg`: a look into its `ChainMap` costs ten times as much."""

    def __missing__(self, kind: type) -> Callable[[Any], Any]:
        return copyreg.dispatch_table[kind]

    def __contains__(self, kind: object) -> bool:
        return super().__contains__(kind) or kind in copyreg.dispatch_table


class Pickler(cloudpickle.Pickler):
    """A pickler that calls ``on_buffer`` for data, and refers to the objects of ``shared``."""

    dispatch_table = _Reductions(cloudpickle.Pickler.dispatch_table)

    def __init__(
        self,
        file: io.BytesIO,
        on_buffer: Any,
        namespace: dict[str, Any],
        shared: Mapping[int, SharedId],
        *,
        by_identity: bool = False,
        kept_names: Collection[str] | None = None,
        has_gradient: Callable[[Any], bool] | None = None,
    ) -> None:
        super().__init__(file, protocol=5, buffer_callback=on_buffer)
        # cloudpickle maps the id of a function's globals to a dict: that of the namespace becomes the receiver's.
        self.globals_ref[id(namespace)] = NamespaceReference()
        self._namespace = namespace
        self._shared = shared
        self._by_identity = by_identity
        self._kept_names = kept_names
        self._is_returned = kept_names is None
        # Whether the gradient of a parameter is a part of it; without this, of none: a copy is measured or compared.
        self._has_gradient = has_gradient
        objects = shared if isinstance(shared, SharedObjects) else SharedObjects()
        self._blocks = MemoryBlocks(objects)
        self._checksums = Checksums(objects)
        self._checked_types = self._checksums.types if by_identity else frozenset[type]()
        # Types whose objects pickle reduces in its own way: structures may have many thousand objects of few types.
        self._ordinary_types: set[type] = set()
        # By id, the tensors and modules that were sent so far.
        self._sent: dict[int, Any] = {}
        # Texts that are sent as names; a program has few, other than data such as a list of words.
        self._names: set[str] = set()

    def persistent_id(self, obj: Any) -> SharedId | ObjectId | int | str | bytes | None:
        """Return the id of an object that both sides hold, or of a number that is the id of one, or a name itself.

        By identity, that of a small array or tensor is a checksum.
        """
        found = self._shared.get(id(obj))
        if found is None:
            kind = type(obj)
            if kind in self._checked_types:
                return self._checksums.of(obj)
            if kind is str:
                return self._id_of_text(obj)
            if kind is int and obj >= _LOWEST_ID and not self._by_identity:
                held = self._shared.get(obj) or self._sent.get(obj)
                return None if held is None else ("id", held)
            return None
        if self._by_identity:
            return id(obj) if found[0] == ITEM or not is_replaced_whole(obj) else None
        if found == OUTDATED:
            raise TypeError(
                f"workers have read from this {type(obj).__qualname__}, and the place that they got to is lost"
            )
        return found

    def _omits_gradient(self, parameter: Any) -> bool:
        return self._has_gradient is None or not self._has_gradient(parameter)

    def _id_of_text(self, text: str) -> SharedId | str | None:
        if text is argparse.SUPPRESS:
            return _SUPPRESS
        # Python interns such constants, which some code compares by ``is``.
        if text in self._names:
            return text
        if self._by_identity or len(text) > _LONGEST_NAME or len(self._names) == _MAX_NAMES or not text.isidentifier():
            return None
        self._names.add(text)
        return text

    def reducer_override(self, obj: Any) -> Any:
        """Reduce an object of the kinds that need it; NotImplemented for any other."""
        if type(obj) in self._ordinary_types:
            return NotImplemented
        if is_tensor(obj) or is_module(obj):
            self._sent[id(obj)] = obj
        if is_plain_array(obj):
            return self._reduce_array(obj)
        if type(obj) is OwnData:
            if is_plain_array(obj.value):
                return self._reduce_array(obj.value, as_data=True)
            return reduce_data(full_tensor(obj.value), self._blocks)
        if is_memory_map(obj):
            return reduce_memory_map(obj, omits_data=self._is_returned and not self._by_identity)
        if type(obj) is memoryview:
            return reduce_memory_view(obj)
        torch = sys.modules.get("torch")
        if (parameter := gathered_from(obj)) is not None and can_read_full():
            obj = parameter.detach()
            if (view := reduce_sharded_view(obj, self._blocks)) is not None:
                return view
            return reduce_tensor(full_tensor(parameter), self._blocks, omits_gradient=True)
        if is_sharded(obj) and (view := reduce_sharded_view(obj, self._blocks)) is not None:
            return view
        if is_sharded(obj):
            is_parameter = isinstance(obj, torch.nn.Parameter)  # type: ignore[union-attr]
            found = full_tensor(obj)
            held = torch.nn.Parameter(found, obj.requires_grad) if is_parameter else found  # type: ignore[union-attr]
            if not self._omits_gradient(obj) and obj.grad is not None:
                held.grad = full_tensor(obj.grad)
            return reduce_tensor(held, self._blocks, omits_gradient=False)
        if hasattr(type(obj), "_accel_nb_reduce"):
            return obj._accel_nb_reduce()
        if torch is not None and isinstance(obj, torch.Tensor) and type(obj) in (torch.Tensor, torch.nn.Parameter):
            return reduce_tensor(obj, self._blocks, omits_gradient=self._omits_gradient(obj))
        if is_of_process(obj):
            is_returned = self._is_returned
            return reduce_widget(obj, is_returned=is_returned) if is_widget(obj) else reduce_of_process(obj)
        if is_lock(obj):
            return reduce_lock(obj)
        if torch is not None and isinstance(obj, torch.Generator):
            return reduce_generator(obj)
        if isinstance(obj, types.CellType):
            return reduce_cell(obj)
        if isinstance(obj, types.CodeType):
            reduced = self.dispatch_table[types.CodeType](obj)
            return rebuild_code, (reduced[1], obj.co_filename)
        # cloudpickle sends the modules that a function uses, but no subclasses, as which `torch.backends.cudnn` is one.
        if isinstance(obj, types.ModuleType) and type(obj) is not types.ModuleType and _is_imported(obj):
            return importlib.import_module, (obj.__name__,)
        if torch is not None and type(obj) is inverse_transform_type(torch):
            return reduce_inverse(obj)
        if isinstance(obj, functools._lru_cache_wrapper) and obj.__module__ == "__main__":
            own = {name: value for name, value in vars(obj).items() if name not in ("__wrapped__", "cache_parameters")}
            return rebuild_cached, (obj.__wrapped__, obj.cache_parameters(), own)
        if type(obj) is functools.cached_property:  # it has a lock up to Python 3.11
            return functools.cached_property, (obj.func,), {"attrname": obj.attrname}
        if isinstance(obj, BaseException) and is_rebuilt_by_init(type(obj)):
            return copyreg.__newobj__, (type(obj), *obj.args), attributes_of(obj) or None  # type: ignore[attr-defined]
        if is_any_file(obj):
            return reduce_file(obj)
        if is_hdf5_object(obj):
            return reduce_hdf5_object(obj)
        if is_custom_operator(obj):
            return reduce_custom_operator(obj)
        if is_csv_writer(obj):
            return reduce_csv_writer(obj)
        if is_event_writer(obj):
            return reduce_event_writer(obj)
        if is_scheduler(obj):
            return reduce_scheduler(obj)
        if is_optimizer(obj):
            return reduce_optimizer(obj)
        if isinstance(obj, types.MethodType) and is_optimizer(obj.__self__) and is_replacement(obj):
            return reduce_replacement(obj)
        if type(obj) is weakref.ref and _is_trained(obj()):
            return weakref.ref, (obj(),)
        if is_hook_handle(obj):
            return reduce_hook_handle(obj)
        if is_parametrized(obj):
            return reduce_parametrized(obj)
        if is_weak_collection(obj):
            return reduce_weak_collection(obj, is_returned=self._is_returned)
        if is_generator_iterator(obj):
            return reduce_generator_iterator(obj)
        if is_loader_iterator(obj):
            return reduce_loader_iterator(obj)
        if is_loader(obj) and has_started_workers(obj):
            return reduce_loader(obj)
        if type(obj).__module__ == "accelerate.accelerator":
            raise TypeError(_PROCESS_BOUND.format(name=type(obj).__name__))
        if self._is_returned and is_data_parallel(obj):
            raise TypeError("it is, or holds, a DistributedDataParallel, which needs the workers' process group")
        reduced = super().reducer_override(obj)
        if isinstance(obj, type):
            if reduced is NotImplemented:
                return reduce_patched_class(obj)
            reduced = reduce_class(obj, with_members_of_the_body(obj, reduced))
        if reduced is NotImplemented and type(obj) not in self.dispatch_table:
            if adds_items_itself(type(obj)):
                return reduce_with_items(reduce_unchanged(obj))
            if is_made_with_arguments(innermost_class(obj)):
                return reduce_without_new(reduce_unchanged(obj))
            if may_change_itself(type(obj)):
                return reduce_unchanged(obj)
        if reduced is NotImplemented and not (isinstance(obj, _VARY_WITHIN_TYPE) or is_tensor(obj) or is_module(obj)):
            if probes_attributes(type(obj)) and type(obj) not in self.dispatch_table:
                return with_own_state(reduce_by_class(obj))
            constants = constants_of(type(obj))
            if name := constants.get(id(obj)):
                return name
            if not constants and not has_type_of_process(obj):
                self._ordinary_types.add(type(obj))
        if self._kept_names is not None and isinstance(obj, type | types.FunctionType) and self._is_named(obj):
            return with_binding(reduced)
        return reduced

    def _is_named(self, obj: Any) -> bool:
        name = obj.__qualname__
        return obj.__module__ == "__main__" and self._namespace.get(name) is obj and name not in self._kept_names  # type: ignore[operator]

    def _dynamic_function_reduce(self, func: types.FunctionType) -> Any:
        # Decorators of libraries use `functools.wraps`: their function has the user's module, but their own globals.
        module = module_of(func.__globals__)
        if module is not None:
            self.globals_ref.setdefault(id(func.__globals__), ModuleNamespaceReference(module))
        make, arguments, state, listed, mapped, _ = super()._dynamic_function_reduce(func)
        # Closure cells are sent: functions that share a variable also share it on the receiving side.
        code, names, *_ = arguments
        plain, slots = state
        # IPython binds a function of its own to ``open`` in a notebook's namespace; workers have that of Python.
        used = {} if module is not None else slots["__globals__"]
        used = {name: value for name, value in used.items() if name != "open" or not is_of_ipython(value)}
        state = plain, {**slots, "__closure__": None, "__globals__": used}
        return make, (code, names, None, None, func.__closure__), state, listed, mapped, set_function_state

    def _reduce_array(self, array: Any, *, as_data: bool = False) -> Any:
        arguments = self._blocks.place_array(array, as_data=as_data)
        if arguments is None:
            return array.__reduce_ex__(5) if as_data else NotImplemented
        return rebuild_array, arguments


class Unpickler(pickle.Unpickler):
    """Reads a stream of `Pickler`; ``memo`` has the objects of an earlier reader of the same stream."""

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
        # By path, the items of long containers that objects refer to.
        self._items: dict[str, list[Any]] = {}

    def persistent_load(self, pid: SharedId | ObjectId | int | str) -> Any:
        """Return the object with an id, or the id of that object in this process, or a name as an interned text."""
        if isinstance(pid, str):
            return sys.intern(pid)
        if isinstance(pid, int):
            return self._earlier_objects[pid]
        if pid == _SUPPRESS:
            return argparse.SUPPRESS
        if len(pid) == 2:
            _, held = pid
            return id(self.persistent_load(held) if isinstance(held, tuple) else held)
        kind, name, path = pid
        if kind == IMPORTED:
            return operator.attrgetter(path)(sys.modules[name.rstrip("/")])  # its attributes have arrived before
        if kind == ITEM:
            return self._item(name, path)
        value = resolve_path(self._namespace, name)
        if kind == "module":
            return submodule_at(value, path)
        if kind == "parameter":
            return parameter_at(value, path)
        if kind == "buffer":
            return buffer_at(value, path)
        if kind == "state":
            return resolve_state_part(value, path)
        if kind == "attribute":
            return vars(value)[path]
        if kind == "group":
            return value.param_groups[int(path)]
        if kind in ("hooks", "registry"):
            below, _, attribute = path.rpartition(":")
            return vars(submodule_at(value, below))[attribute]
        if kind == "gradient hooks":
            below, _, attribute = path.rpartition(":")
            return gradient_hook_dict(parameter_at(value, below), attribute)
        return value

    def _item(self, path: str, place: str) -> Any:
        """Return an item of a long container by its number, as ``3/200``; raise LookupError if it has other items."""
        if path not in self._items:
            self._items[path] = changeable_items(resolve_path(self._namespace, path))
        items = self._items[path]
        number, size = map(int, place.split("/"))
        if len(items) != size:
            raise LookupError(f"{path!r} has {len(items)} changeable items in place of {size}")
        return items[number]
