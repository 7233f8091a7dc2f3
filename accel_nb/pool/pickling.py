"""Values to bytes and back, on either side of the pool, by cloudpickle with three additions.

* The data of tensors and arrays travels out of band, into an arena.
* A function defined in a cell shares the receiving namespace as its globals, so that later rebinding is seen.
* What both sides already hold (a named model, its parameters and submodules) travels as a reference, so that an
  optimizer that arrives steps the parameters that are already there.

Both ends run the user's own code and the channel between them is anonymous: nothing here reads a file or a network.
"""

from __future__ import annotations

import io
import pickle
import sys
import types
import zlib
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import cloudpickle

from accel_nb.pool.kinds import is_module, is_optimizer, is_scheduler
from accel_nb.pool.parts import find
from accel_nb.runtime.sharded import is_sharded, whole

SharedId = tuple[str, str, str]
"""How both sides name an object that they both hold: (kind, path from a name, path below it in a module)."""


def dump(
    value: Any, *, namespace: dict[str, Any], shared: Mapping[int, SharedId], kept_names: Collection[str] | None = None
) -> tuple[bytes, list[memoryview]]:
    """Return the pickle stream of a value and its out-of-band buffers.

    With ``kept_names``, loading the stream also binds the functions and classes of ``namespace`` that the value leads
    to, under their names there, so that the receiver can pickle them by reference; those names are left as they are.
    Raises whatever the value's own reduction raises when it cannot be copied.
    """
    stream, buffers = io.BytesIO(), []
    _Pickler(stream, buffers.append, namespace, shared, kept_names).dump(value)
    return stream.getvalue(), [buffer.raw() for buffer in buffers]


def load(stream: bytes, buffers: Iterable[memoryview], *, namespace: dict[str, Any]) -> Any:
    """Rebuild a value; references to shared objects are looked up in ``namespace``."""
    return _Unpickler(io.BytesIO(stream), namespace, buffers).load()


def digest(value: Any, *, namespace: dict[str, Any], shared: Mapping[int, SharedId]) -> bytes:
    """Return a short fingerprint of a value's content, tensors and arrays included."""
    stream, buffers = dump(value, namespace=namespace, shared=shared)
    code = zlib.crc32(stream)
    for buffer in buffers:
        code = zlib.crc32(buffer, code)
    return len(stream).to_bytes(8, "little") + code.to_bytes(4, "little")


def shared_ids(objects: Mapping[str, Any]) -> dict[int, SharedId]:
    """Name everything reachable by both sides below ``objects`` (name to object): modules with all their parts."""
    ids: dict[int, SharedId] = {}
    for name, value in objects.items():
        if not _has_identity(value):
            continue
        ids.setdefault(id(value), ("name", name, ""))
        if is_module(value):
            for path, part in value.named_modules():
                ids.setdefault(id(part), ("module", name, path))
            for path, part in value.named_parameters():
                ids.setdefault(id(part), ("parameter", name, path))
            for path, part in value.named_buffers():
                ids.setdefault(id(part), ("buffer", name, path))
    return ids


def _has_identity(value: Any) -> bool:
    """Whether it matters which object this is. Python shares equal numbers, strings and tuples as it likes: not these.

    What can be imported is the same on both sides already.
    """
    if isinstance(value, type | types.FunctionType):
        return value.__module__ == "__main__"
    return not isinstance(value, int | float | complex | str | bytes | tuple | frozenset | types.ModuleType | None)


def _reduce_cell(cell: types.CellType) -> Any:
    """Copy a closure's cell, empty at first: the function that it belongs to may be in it."""
    try:
        state = (cell.cell_contents,)
    except ValueError:  # nothing has been put in yet
        state = None
    return types.CellType, (), state, None, None, _set_cell


def _set_cell(cell: types.CellType, state: tuple[Any]) -> None:
    cell.cell_contents = state[0]


def _reduce_scheduler(scheduler: Any) -> Any:
    """Copy a scheduler without the ``step`` that an instance may carry: it belongs to one process."""
    make, arguments, state, *rest = scheduler.__reduce_ex__(5)
    return make, arguments, {name: value for name, value in state.items() if name != "step"}, *rest


def _reduce_optimizer(optimizer: Any) -> Any:
    """Copy an optimizer with the attributes of its own that torch leaves out, such as those of LBFGS."""
    make, arguments, state, *rest = optimizer.__reduce_ex__(5)
    theirs = ("_optimizer_", "_zero_grad", "_warned", "_patched", "_opt_called")
    own = {
        name: value
        for name, value in vars(optimizer).items()
        if name not in (*state, "step", "zero_grad") and not name.startswith(theirs)
    }
    return make, arguments, {**state, **own}, *rest


def _main_namespace() -> dict[str, Any]:
    """Return the namespace of cells in this process."""
    return sys.modules["__main__"].__dict__


class _NamespaceReference(dict[str, Any]):
    """Stands for the namespace of cells while a function's globals are pickled."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _main_namespace, ()


class _Storage:
    """One tensor storage in a stream; tensors that share memory share it after the journey too."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild_storage, (pickle.PickleBuffer(self.data),)


class _Pickler(cloudpickle.Pickler):
    def __init__(
        self,
        file: io.BytesIO,
        keep_buffer: Any,
        namespace: dict[str, Any],
        shared: Mapping[int, SharedId],
        kept_names: Collection[str] | None,
    ) -> None:
        super().__init__(file, protocol=5, buffer_callback=keep_buffer)
        # cloudpickle keeps one globals dict for each id of a function's globals: ours points to the receiver's.
        self.globals_ref[id(namespace)] = _NamespaceReference()
        self._namespace = namespace
        self._shared = shared
        self._kept_names = kept_names
        self._storages: dict[tuple[int, int], tuple[_Storage, Any]] = {}

    def persistent_id(self, obj: Any) -> SharedId | None:
        return self._shared.get(id(obj))

    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")
        if is_sharded(obj):
            is_parameter = isinstance(obj, torch.nn.Parameter)  # type: ignore[union-attr]
            found = whole(obj)
            return self._reduce_tensor(torch, torch.nn.Parameter(found, obj.requires_grad) if is_parameter else found)  # type: ignore[union-attr]
        if hasattr(type(obj), "_accel_nb_reduce"):
            return obj._accel_nb_reduce()
        if torch is not None and isinstance(obj, torch.Tensor) and type(obj) in (torch.Tensor, torch.nn.Parameter):
            return self._reduce_tensor(torch, obj)
        if isinstance(obj, types.CellType):
            return _reduce_cell(obj)
        if is_scheduler(obj):
            return _reduce_scheduler(obj)
        if is_optimizer(obj):
            return _reduce_optimizer(obj)
        if type(obj).__module__ == "accelerate.accelerator":
            raise TypeError(_OF_ONE_PROCESS.format(name=type(obj).__name__))
        reduced = super().reducer_override(obj)
        if self._kept_names is not None and isinstance(obj, type | types.FunctionType) and self._is_named(obj):
            return _binding(reduced)
        return reduced

    def _is_named(self, obj: Any) -> bool:
        name = obj.__qualname__
        return obj.__module__ == "__main__" and self._namespace.get(name) is obj and name not in self._kept_names  # type: ignore[operator]

    def _dynamic_function_reduce(self, func: types.FunctionType) -> Any:
        make, arguments, state, listed, mapped, _ = super()._dynamic_function_reduce(func)
        # The cells themselves go along: functions that share a variable share it after the journey too.
        code, names, *_ = arguments
        plain, slots = state
        state = plain, {**slots, "__closure__": None}
        return make, (code, names, None, None, func.__closure__), state, listed, mapped, _set_function_state

    def _reduce_tensor(self, torch: Any, tensor: Any) -> Any:
        if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
            return tensor.__reduce_ex__(5)
        data = tensor.detach()
        device = "cpu" if data.is_cpu else "worker"
        if not data.is_cpu:
            data = data.cpu()
        if data.numel() * data.element_size() * 2 < data.untyped_storage().nbytes():
            data = data.clone()  # a small window of something large: send the window
        storage = data.untyped_storage()
        key = (storage.data_ptr(), storage.nbytes())
        if key not in self._storages:
            self._storages[key] = _Storage(_as_bytes(torch, storage)), data
        held, _ = self._storages[key]
        layout = (data.storage_offset(), tuple(data.size()), data.stride())
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        requires_grad = tensor.requires_grad and (is_parameter or tensor.is_leaf)
        name = str(data.dtype).removeprefix("torch.")
        return _rebuild_tensor, (held, name, layout, requires_grad, is_parameter, device)


_OF_ONE_PROCESS = (
    "it holds an {name} of the package accelerate, as a transformers Trainer does, which serves the process and the "
    "devices that it was built for only"
)


def _binding(reduced: Any) -> Any:
    """Return the reduction of a function or class with a last step that binds its name."""
    if not isinstance(reduced, tuple) or len(reduced) < 6 or reduced[5] is None:
        return reduced
    make, arguments, state, listed, mapped, set_state = reduced
    return make, arguments, (set_state, state), listed, mapped, _set_state_and_bind


def _set_state_and_bind(value: Any, state: tuple[Any, Any]) -> None:
    set_state, own = state
    set_state(value, own)
    _main_namespace()[value.__qualname__] = value


def _as_bytes(torch: Any, storage: Any) -> Any:
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy()


def _set_function_state(function: types.FunctionType, state: Any) -> None:
    """Set a function's state; of its globals only those that the receiver lacks: the others are its own."""
    plain, slots = state
    missing = {name: value for name, value in slots["__globals__"].items() if name not in function.__globals__}
    cloudpickle.cloudpickle._function_setstate(function, (plain, {**slots, "__globals__": missing}))


def _rebuild_storage(buffer: Any) -> Any:
    import torch

    view = memoryview(buffer)
    if not view.nbytes:
        return torch.UntypedStorage(0)
    return torch.frombuffer(view, dtype=torch.uint8).untyped_storage()


def _rebuild_tensor(
    storage: Any, dtype: str, layout: tuple[Any, Any, Any], requires_grad: bool, is_parameter: bool, device: str
) -> Any:
    import torch

    tensor = torch.empty(0, dtype=getattr(torch, dtype)).set_(storage, *layout)
    if device == "worker" and torch.cuda.is_available():
        tensor = tensor.cuda()
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_(requires_grad)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, namespace: dict[str, Any], buffers: Iterable[memoryview]) -> None:
        super().__init__(file, buffers=buffers)
        self._namespace = namespace

    def persistent_load(self, pid: SharedId) -> Any:
        kind, name, path = pid
        value = find(self._namespace, name)
        if kind == "module":
            return value.get_submodule(path)
        if kind == "parameter":
            return value.get_parameter(path)
        if kind == "buffer":
            return value.get_buffer(path)
        return value
