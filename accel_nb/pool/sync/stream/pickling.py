"""Serialization of values between kernel and workers, by cloudpickle with five additions.

* The data of tensors and arrays is sent out of band, in the buffers of a payload; those that share memory
  do so at the receiver too.
* A function defined in a cell gets the receiving namespace as its globals, so that later bindings take effect.
* Objects that kernel and workers share (a named model, its parameters and submodules) are sent as references, so
  that an optimizer that is sent later updates the parameters of the receiver's model.
* A number that is the `id` of such an object, or of a tensor or module in the stream, becomes the id that the object
  has on the receiving side: notebooks choose parameters by lists of ids that an earlier cell has made.
* Several values are sent in one stream as sections: objects that they share stay shared, and a section that cannot be
  rebuilt affects only sections that share an object with it (`accel_nb.pool.sync.stream.sections`).

Both processes run the user's code, and only the engine connects them: no data is unpickled from files or networks.
"""

from __future__ import annotations

import io
import pickle
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

from accel_nb.pool.sync.objects.shared_ids import SharedId
from accel_nb.pool.sync.stream.pickler import Pickler, Unpickler


def dump(value: Any, *, namespace: dict[str, Any], shared: Mapping[int, SharedId]) -> tuple[bytes, list[memoryview]]:
    """Return the pickle stream of a value and its out-of-band buffers.

    Raise the error of the value's ``__reduce__`` if it cannot be copied.
    """
    stream, buffers = io.BytesIO(), []
    Pickler(stream, buffers.append, namespace, shared).dump(value)
    return stream.getvalue(), [buffer.raw() for buffer in buffers]


def load(stream: bytes, buffers: Iterable[memoryview], *, namespace: dict[str, Any]) -> Any:
    """Rebuild a value; references to shared objects are looked up in ``namespace``."""
    return Unpickler(io.BytesIO(stream), namespace, buffers).load()


def copyable_values(
    values: Mapping[Any, Any], namespace: dict[str, Any], shared: Mapping[int, SharedId]
) -> dict[Any, Any]:
    """Return the values that can be copied."""
    copyable: dict[Any, Any] = {}
    for key, value in values.items():
        try:
            dump(value, namespace=namespace, shared=shared)
        except Exception:  # such as a lock, a file or a generator
            continue
        copyable[key] = value
    return copyable


class CopyChecker:
    """Pickles values one after another, to find whether they can be copied and how large the copies are.

    An object that two values contain is copied once, as in one stream of `dump_sections`.
    """

    def __init__(self, namespace: dict[str, Any], shared: Mapping[int, SharedId]) -> None:
        self._namespace, self.shared = namespace, shared
        self.reset()

    def reset(self) -> None:
        """Forget earlier values: an object of these counts again in the next value that contains it."""
        self._stream, self._buffers = io.BytesIO(), list[pickle.PickleBuffer]()
        self._pickler = Pickler(self._stream, self._buffers.append, self._namespace, self.shared)

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


def digest(value: Any, *, namespace: dict[str, Any], shared: Mapping[int, SharedId]) -> bytes:
    """Return a short fingerprint of a value's content, tensors and arrays included.

    It is valid in this process only: shared objects are included by identity, whichever paths they have. Those that are
    never changed in place, but replaced, are included by content: a change of one is a change of the value.
    """
    stream, buffers = io.BytesIO(), []
    Pickler(stream, buffers.append, namespace, shared, by_identity=True).dump(value)
    code = zlib.crc32(stream.getbuffer())
    for buffer in buffers:
        code = zlib.crc32(buffer.raw(), code)
    return stream.tell().to_bytes(8, "little") + code.to_bytes(4, "little")
