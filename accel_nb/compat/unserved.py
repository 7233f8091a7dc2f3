"""Names that libraries import whether they use them or not: what is an error is to use one."""

from __future__ import annotations

from typing import Any, NoReturn

from accel_nb.compat.names import UNSERVED, reason_for
from accel_nb.errors import MisuseError


class _Unserved(type):
    """Makes calling a class, or one derived from it, an error."""

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        name = next(base.__name__ for base in cls.__mro__ if base.__name__ in UNSERVED)
        raise MisuseError(f"{name} is not offered by accel_nb: {reason_for(name)}")


def __getattr__(name: str) -> type:
    """Return a class of that name, the same one each time."""
    if name not in UNSERVED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals().setdefault(name, _Unserved(name, (), {"__module__": __name__}))
