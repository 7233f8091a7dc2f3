"""Names that libraries import whether they use them or not: what is an error is to use one."""

from __future__ import annotations

from typing import Any, NoReturn

from accel_nb.compat.names import UNSERVED, reason_for
from accel_nb.errors import MisuseError


class UnservedAttribute(MisuseError, AttributeError):
    """An attribute of a name that is not offered: `hasattr` says no, and who asks for it reads the reason."""


class _Unserved(type):
    """Makes it an error to call a class or one derived from it, to read its attributes, or to use it as a constant."""

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise MisuseError(_refusal(cls))

    def __getattr__(cls, name: str) -> NoReturn:
        raise UnservedAttribute(_refusal(cls))

    def __iter__(cls) -> NoReturn:
        raise MisuseError(_refusal(cls))

    def __contains__(cls, item: object) -> NoReturn:
        raise MisuseError(_refusal(cls))


def _refusal(kind: type) -> str:
    name = next(base.__name__ for base in kind.__mro__ if base.__name__ in UNSERVED)
    return f"{name} is not offered by accel_nb: {reason_for(name)}"


def __getattr__(name: str) -> type:
    """Return a class of that name, the same one each time."""
    if name not in UNSERVED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals().setdefault(name, _Unserved(name, (), {"__module__": __name__}))
