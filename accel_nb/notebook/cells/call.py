"""A call that runs in place of a cell: how it is named while it travels, and how its results come back. Torch-free."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from accel_nb.errors import ShippingError
from accel_nb.pool.payload import BufferPayload, PayloadFactory
from accel_nb.pool.pool import POLL_S, START_PATIENCE_S
from accel_nb.pool.sync.pickling import SharedId, dump, load

RESULT = "result"
"""Name of the payload that holds what a call returned."""


@dataclass(frozen=True, slots=True)
class Call:
    """A function with its arguments, and what each worker finds in its environment while it runs."""

    function: functools.partial[Any]
    name: str
    bound_to: str = "_accel_nb_call"
    """The name that it has in the notebook and on the workers while it runs."""
    variables: Mapping[str, str] = field(default_factory=dict)
    prefix: Callable[[int], str] | None = None
    """What stands in front of each line that a rank prints; every rank's lines are shown then."""
    notes: Sequence[str] = ()
    """Lines that are shown below the launch."""
    poll_s: float = POLL_S
    patience_s: float = START_PATIENCE_S
    """How long workers may take to start."""

    def to_body(self) -> dict[str, Any]:
        """Return what a worker needs to know, JSON-ready."""
        return {"bound_to": self.bound_to, "variables": dict(self.variables)}

    def culprit(self, namespace: dict[str, Any]) -> str:
        """Say which part of the call cannot be copied to the workers, as far as one alone cannot."""
        parts = {"the function": self.function.func}
        parts |= {f"argument {index}": value for index, value in enumerate(self.function.args)}
        for part, value in parts.items():
            try:
                dump(value, namespace=namespace, shared={})
            except Exception as error:
                kind = f"{type(value).__module__}.{type(value).__qualname__}"
                return (
                    f"{part} of {self.name} ({kind}) cannot be sent to the workers: {type(error).__name__}: {error}. "
                    "Make what cannot be copied inside of the function."
                )
        return ""


def pack_result(
    value: Any, namespace: dict[str, Any], shared: Mapping[int, SharedId], payloads: PayloadFactory, rank: int
) -> BufferPayload:
    """Write what a rank's call returned; an object that the notebook holds too goes as a reference to it.

    Raises ShippingError when the value cannot be copied.
    """
    try:
        return payloads.write(*dump(value, namespace=namespace, shared=shared))
    except Exception as error:  # whatever a value's own reduction raises
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise ShippingError(
            f"what the function returned on rank {rank} ({kind}) cannot be copied to the notebook: "
            f"{type(error).__name__}: {error}. What it trained has come back all the same; return numbers, tensors, "
            "models or plain containers of these."
        ) from None


def read_result(payload: BufferPayload, namespace: dict[str, Any]) -> Any:
    """Rebuild what a rank's call returned."""
    stream, buffers = payload.read()
    return load(stream, buffers, namespace=namespace)
