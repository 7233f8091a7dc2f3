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

from accel_nb.pool.sync.contents.content_kinds import is_replaced_whole
from accel_nb.pool.sync.contents.long_items import changeable_items
from accel_nb.pool.sync.objects.object_kinds import (
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
from accel_nb.pool.sync.paths.object_paths import resolve_path
from accel_nb.pool.sync.reductions.cell_classes import reduce_class
from accel_nb.pool.sync.reductions.class_bodies import with_body_members
from accel_nb.pool.sync.reductions.custom_operators import is_custom_operator, reduce_custom_operator
from accel_nb.pool.sync.reductions.event_writers import is_event_writer, reduce_event_writer
from accel_nb.pool.sync.reductions.function_reduction import (
    ModuleNamespaceReference,
    NamespaceReference,
    is_cached_function,
    is_cached_property,
    is_closure_cell,
    is_code,
    is_of_ipython,
    module_of,
    reduce_cached_function,
    reduce_cached_property,
    reduce_closure_cell,
    reduce_code,
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
    is_inverse_transform,
    is_made_with_arguments,
    is_rebuilt_by_init,
    may_change_itself,
    probes_attributes,
    reduce_by_class,
    reduce_exception,
    reduce_inverse,
    reduce_unchanged,
    reduce_with_items,
    reduce_without_new,
    with_own_state,
)
from accel_nb.pool.sync.reductions.open_files import is_csv_writer, is_file_object, reduce_csv_writer, reduce_file
from accel_nb.pool.sync.reductions.optimizer_reduction import reduce_optimizer, reduce_replacement, reduce_scheduler
from accel_nb.pool.sync.reductions.parametrized import is_parametrized, reduce_parametrized
from accel_nb.pool.sync.reductions.patched_classes import reduce_patched_class
from accel_nb.pool.sync.reductions.process_objects import has_type_of_process, is_of_process, reduce_of_process
from accel_nb.pool.sync.reductions.tensor_reduction import (
    reduce_data,
    reduce_generator,
    reduce_other_leaf,
    reduce_sharded_view,
    reduce_tensor,
)
from accel_nb.pool.sync.reductions.weak_collections import is_weak_collection, reduce_weak_collection
from accel_nb.pool.sync.reductions.widgets import is_widget, reduce_widget
from accel_nb.pool.sync.stream.small_data import Checksums
from accel_nb.runtime.distributed.held_gradients import gradient_of
from accel_nb.runtime.distributed.sharded import full_tensor, is_sharded
from accel_nb.runtime.leaf_tensors import is_leaf
from accel_nb.runtime.tensors.instance_patching import innermost_class
from accel_nb.runtime.tensors.module_paths import buffer_at, parameter_at, submodule_at

_LOWEST_ID = 1 << 32
"""Numbers below are data: Python keeps small objects at higher addresses."""


_LONGEST_NAME, _MAX_NAMES = 20, 1000
"""Longer strings, and strings beyond this number in a stream, are data: to intern one costs a call."""


_SUPPRESS: SharedId = ("constant", "argparse.SUPPRESS", "")
"""The id of a string that argparse distinguishes by identity from equal strings."""


_PROCESS_BOUND = (
    "it holds an {name} of the package accelerate, as a transformers Trainer does, which works only in the "
    "process and on the devices that it was built for"
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


def _is_torch_generator(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Generator)


def _is_module_subclass(value: Any) -> bool:
    """Return whether a value is an imported module of a class of its own, as ``torch.backends.cudnn`` is one.

    cloudpickle sends the other modules that a function uses.
    """
    is_of_subclass = isinstance(value, types.ModuleType) and type(value) is not types.ModuleType
    return is_of_subclass and sys.modules.get(value.__name__) is value


def _reduce_module(module: types.ModuleType) -> Any:
    return importlib.import_module, (module.__name__,)


def _is_weak_reference(value: Any) -> bool:
    """Return whether a value is a weak reference to an object of training, which others hold too."""
    if type(value) is not weakref.ref:
        return False
    referent = value()
    return is_tensor(referent) or is_module(referent) or is_optimizer(referent)


def _reduce_weak_reference(reference: weakref.ref[Any]) -> Any:
    return weakref.ref, (reference(),)


def _has_started_workers(value: Any) -> bool:
    return is_loader(value) and has_started_workers(value)


_KINDS: tuple[tuple[Callable[[Any], bool], Callable[[Any], Any]], ...] = (
    (is_lock, reduce_lock),
    (_is_torch_generator, reduce_generator),
    (is_closure_cell, reduce_closure_cell),
    (is_code, reduce_code),
    (_is_module_subclass, _reduce_module),
    (is_inverse_transform, reduce_inverse),
    (is_cached_function, reduce_cached_function),
    (is_cached_property, reduce_cached_property),
    (is_rebuilt_by_init, reduce_exception),
    (is_file_object, reduce_file),
    (is_hdf5_object, reduce_hdf5_object),
    (is_custom_operator, reduce_custom_operator),
    (is_csv_writer, reduce_csv_writer),
    (is_event_writer, reduce_event_writer),
    (is_scheduler, reduce_scheduler),
    (is_optimizer, reduce_optimizer),
    (is_replacement, reduce_replacement),
    (_is_weak_reference, _reduce_weak_reference),
    (is_hook_handle, reduce_hook_handle),
    (is_parametrized, reduce_parametrized),
    (is_generator_iterator, reduce_generator_iterator),
    (is_loader_iterator, reduce_loader_iterator),
    (_has_started_workers, reduce_loader),
)
"""The kinds of objects that pickle copies wrongly or not at all, each with its reduction."""


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
        # Returns whether a parameter is sent with its gradient. None: never, since the copy is measured or compared.
        self._has_gradient = has_gradient
        objects = shared if isinstance(shared, SharedObjects) else SharedObjects()
        self._blocks = MemoryBlocks(objects)
        self._checksums = Checksums(objects)
        self._checked_types = self._checksums.types if by_identity else frozenset[type]()
        # Types whose objects pickle reduces in its own way: structures may have many thousand objects of few types.
        self._ordinary_types: set[type] = set()
        # By id, the tensors and modules that were sent so far.
        self._sent: dict[int, Any] = {}
        # By id, sharded tensors and the full ones that were gathered: where a tensor is sent twice, both share memory.
        self._gathered: dict[int, tuple[Any, Any]] = {}
        # Strings that are sent as names; a program has few, other than data such as a list of words.
        self._names: set[str] = set()

    def persistent_id(self, obj: Any) -> SharedId | ObjectId | int | str | bytes | None:
        """Return the id of a shared object, or of a number that is the `id` of one, or a name itself.

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
                shared_id = self._shared.get(obj) or self._sent.get(obj)
                return None if shared_id is None else ("id", shared_id)
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

    def _gradient_of(self, tensor: Any) -> Any:
        """Return the gradient with which a tensor is sent, or None."""
        if not is_leaf(tensor):
            return tensor.grad if tensor.retains_grad else None
        if isinstance(tensor, sys.modules["torch"].nn.Parameter) and self._omits_gradient(tensor):
            return None
        return full_tensor(gradient_of(tensor))

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
        if (reduced := self._reduce_data(obj)) is not None:
            return reduced
        if hasattr(type(obj), "_accel_nb_reduce"):
            return obj._accel_nb_reduce()
        if is_of_process(obj):
            is_returned = self._is_returned
            return reduce_widget(obj, is_returned=is_returned) if is_widget(obj) else reduce_of_process(obj)
        if is_weak_collection(obj):
            return reduce_weak_collection(obj, is_returned=self._is_returned)
        for is_kind, reduce in _KINDS:
            if is_kind(obj):
                return reduce(obj)
        self._refuse_bound(obj)
        return self._reduce_other(obj)

    def _reduce_data(self, obj: Any) -> Any:
        """Reduce a tensor, an array or a view of memory; return None for any other object."""
        if is_plain_array(obj):
            return self._reduce_array(obj)
        if type(obj) is OwnData:
            if is_plain_array(obj.value):
                return self._reduce_array(obj.value, as_data=True)
            return reduce_data(self._gather(obj.value), self._blocks)
        if is_memory_map(obj):
            return reduce_memory_map(obj, omits_data=self._is_returned and not self._by_identity)
        if type(obj) is memoryview:
            return reduce_memory_view(obj)
        if not is_tensor(obj):
            return None
        if is_sharded(obj):
            return self._reduce_sharded(obj)
        torch = sys.modules["torch"]
        if type(obj) in (torch.Tensor, torch.nn.Parameter):
            return reduce_tensor(obj, self._blocks, self._gradient_of(obj))
        return reduce_other_leaf(obj)

    def _reduce_sharded(self, tensor: Any) -> Any:
        """Reduce a sharded tensor to a view of one that the receiver holds, or to the full tensor."""
        if (view := reduce_sharded_view(tensor, self._blocks)) is not None:
            return view
        full, torch = self._gather(tensor), sys.modules["torch"]
        if isinstance(tensor, torch.nn.Parameter):
            full = torch.nn.Parameter(full, tensor.requires_grad)
        gradient = None if self._omits_gradient(tensor) else gradient_of(tensor)
        return reduce_tensor(full, self._blocks, None if gradient is None else full_tensor(gradient))

    def _gather(self, tensor: Any) -> Any:
        """Return the full tensor of a sharded one, gathered once; any other is returned itself."""
        if not is_sharded(tensor):
            return tensor
        if id(tensor) not in self._gathered:
            self._gathered[id(tensor)] = tensor, full_tensor(tensor)
        return self._gathered[id(tensor)][1]

    def _refuse_bound(self, obj: Any) -> None:
        """Raise TypeError for an object that is of use in this process only."""
        if type(obj).__module__ == "accelerate.accelerator":
            raise TypeError(_PROCESS_BOUND.format(name=type(obj).__name__))
        if self._is_returned and is_data_parallel(obj):
            raise TypeError("it is, or holds, a DistributedDataParallel, which needs the workers' process group")

    def _reduce_other(self, obj: Any) -> Any:
        """Reduce a class, a function, or an object by the methods of its class."""
        reduced = super().reducer_override(obj)
        if isinstance(obj, type):
            if reduced is NotImplemented:
                return reduce_patched_class(obj)
            reduced = reduce_class(obj, with_body_members(obj, reduced))
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
            _, key = pid
            return id(self.persistent_load(key) if isinstance(key, tuple) else key)
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
