"""Several values in one pickle stream: a section that cannot be rebuilt affects only those that share its objects."""

from __future__ import annotations

import io
import itertools
import pickle
import pickletools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from accel_nb.pool.sync.objects.shared_ids import SharedId
from accel_nb.pool.sync.stream.pickler import Pickler, Unpickler

Key = TypeVar("Key")


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
    has_gradient: Callable[[Any], bool] | None = None,
) -> tuple[bytes, list[memoryview]]:
    """Return one stream with a section for each value, and the out-of-band buffers; read by `load_sections`.

    A later section refers to an object of an earlier one instead of repeating it. With ``kept_names``, loading the
    stream also binds the functions and classes of ``namespace`` that a value refers to, under their names, so that the
    receiver can pickle them by reference; names in ``kept_names`` are not rebound. Parameters for which
    ``has_gradient`` returns True keep their gradients. Raise SectionError.
    """
    stream, buffers = io.BytesIO(), []
    pickler = Pickler(stream, buffers.append, namespace, shared, kept_names=kept_names, has_gradient=has_gradient)
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
    unpickler = Unpickler(io.BytesIO(stream), namespace, buffers)
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
        unpickler = Unpickler(io.BytesIO(_fill_memo(len(memo)) + stream[places[index + 1] :]), namespace, rest, memo)
        unpickler.load()
    return values, errors


_LOST = object()
"""Placeholder in a memo for an object of a section that could not be rebuilt."""


def _format_key(key: Any) -> str:
    return str(key[-1]) if isinstance(key, tuple) else str(key)


def _references(section: bytes) -> set[Any]:
    """Return the memo indices that a section reads."""
    return {argument for opcode, argument, _ in pickletools.genops(section) if opcode.name.endswith("GET")}


def _num_memoized(section: bytes) -> int:
    return sum(opcode.name == "MEMOIZE" for opcode, _, _ in pickletools.genops(section))


def _fill_memo(size: int) -> bytes:
    """Return a stream that fills an empty memo with the objects of the persistent ids 0 to ``size - 1``."""
    opcodes = b"".join(b"J" + place.to_bytes(4, "little") + b"Q\x940" for place in range(size))  # BINPERSID MEMOIZE POP
    return b"\x80\x05" + opcodes + b"N."


def _constants(section: bytes, memo: Sequence[Any], find_class: Callable[[str, str], Any]) -> list[Any]:
    """Return the objects that a section adds to the memo: strings, bytes and imported objects, else `_LOST`.

    The names of attributes and classes are in the memo too: without them most later sections would be lost too.
    """
    found: list[Any] = []
    pushed: list[Any] = []
    for opcode, argument, _ in pickletools.genops(section):
        if opcode.name == "MEMOIZE":
            found.append(pushed[-1])
        elif opcode.name.endswith("GET"):
            place = int(argument or 0)
            pushed.append(memo[place] if place < len(memo) else found[place - len(memo)])
        elif opcode.name == "STACK_GLOBAL":
            try:
                pushed.append(find_class(*pushed[-2:]))
            except Exception:  # an object that cannot be imported is lost
                pushed.append(_LOST)
        elif opcode.name == "BINPERSID" and isinstance(pushed[-1], str):
            continue  # a name, which is its own id
        elif opcode.name != "FRAME":
            pushed.append(argument if isinstance(argument, str | bytes) else _LOST)
    return found
