"""Function calls that run on the workers in place of a cell, and the transfer of their results. Imports no torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from accel_nb.errors import ShippingError, error_text
from accel_nb.pool.payload import BufferPayload, PayloadFactory
from accel_nb.pool.pool import POLL_S, START_TIMEOUT_S
from accel_nb.pool.sync.objects.shared_ids import SharedId
from accel_nb.pool.sync.stream.pickling import dump, load

RESULT = "result"
"""Name of the payload that holds what a call returned."""


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A function with its arguments, and the environment that it runs in on each worker."""

    function: functools.partial[Any]
    name: str
    bound_name: str = "_accel_nb_call"
    """The name that the function is bound to in the notebook and on the workers while it runs."""
    variables: Mapping[str, str] = field(default_factory=dict)
    line_prefix: Callable[[int], str] | None = None
    """Returns the prefix of each line that a rank prints; if set, the lines of every rank are shown."""
    notes: Sequence[str] = ()
    """Lines to show below the output."""
    poll_s: float = POLL_S
    start_timeout_s: float = START_TIMEOUT_S
    """How long workers may take to start, in seconds."""

    def describe_unsendable_part(self, namespace: dict[str, Any]) -> str:
        """Return a message about the first part of the call that cannot be pickled alone, or an empty text."""
        parts = {"the function": self.function.func}
        parts |= {f"argument {index}": value for index, value in enumerate(self.function.args)}
        for part, value in parts.items():
            try:
                dump(value, namespace=namespace, shared={})
            except Exception as error:
                kind = f"{type(value).__module__}.{type(value).__qualname__}"
                return (
                    f"{part} of {self.name} ({kind}) cannot be sent to the workers: {type(error).__name__}: "
                    f"{error_text(error)}. Create objects that cannot be copied inside the function, and let it return "
                    "its results, in place of a queue: the launcher returns each rank's value."
                )
        return ""


def pack_result(
    value: Any, namespace: dict[str, Any], shared: Mapping[int, SharedId], payloads: PayloadFactory, rank: int
) -> BufferPayload:
    """Serialize the value that a rank's call returned; objects that the notebook shares become references to them.

    Raise ShippingError if the value cannot be copied.
    """
    try:
        return payloads.write(*dump(value, namespace=namespace, shared=shared))
    except Exception as error:  # a value's own reduction may raise anything
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise ShippingError(
            f"what the function returned on rank {rank} ({kind}) cannot be copied to the notebook: "
            f"{type(error).__name__}: {error_text(error)}. Models that it trained are in the notebook; return numbers, "
            "tensors, models or plain containers of these."
        ) from None


def read_result(payload: BufferPayload, namespace: dict[str, Any]) -> Any:
    """Deserialize the value that a rank's call returned."""
    stream, buffers = payload.read()
    return load(stream, buffers, namespace=namespace)
