"""Placeholders for unsupported names, which libraries import without use; using one raises an error."""

from __future__ import annotations

from typing import Any, NoReturn

from accel_nb.compat.names.table import UNSUPPORTED, reason_for
from accel_nb.errors import MisuseError


class UnsupportedAttribute(MisuseError, AttributeError):
    """Access to an attribute of an unsupported name: `hasattr` is false, and the message has the reason."""


class _Unsupported(type):
    """Metaclass that raises on a call of the class or a subclass, on attribute access, and on use as a constant."""

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise MisuseError(_unsupported_message(cls))

    def __getattr__(cls, name: str) -> NoReturn:
        raise UnsupportedAttribute(_unsupported_message(cls))

    def __iter__(cls) -> NoReturn:
        raise MisuseError(_unsupported_message(cls))

    def __contains__(cls, item: object) -> NoReturn:
        raise MisuseError(_unsupported_message(cls))


def _unsupported_message(kind: type) -> str:
    name = next(base.__name__ for base in kind.__mro__ if base.__name__ in UNSUPPORTED)
    return f"{name} is not offered by accel_nb: {reason_for(name)}"


def __getattr__(name: str) -> type:
    """Return the placeholder class of that name, which is created once."""
    if name not in UNSUPPORTED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals().setdefault(name, _Unsupported(name, (), {"__module__": __name__}))
