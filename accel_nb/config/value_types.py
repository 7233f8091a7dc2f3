"""Types of option values, and functions that parse them from text.

Flags and environment variables are text; values in files and code have types. Each ``read_...`` function parses text
and returns other values unchanged, so that the strict types can check them (True is not 1, 4.0 is not 4).
"""

import re
from collections.abc import Sequence
from keyword import iskeyword
from typing import Annotated, Any, cast

from pydantic import AfterValidator, BeforeValidator, Field

from accel_nb.config.byte_sizes import bytes_of

MAX_WORKERS = 1024
MAX_SEED = 2**63 - 1
MONTH_S = 30 * 24 * 3600

_INT = re.compile(r"[+-]?[0-9]{1,20}")
_FLOAT = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_DURATION = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+) ?(s|min|h|d)")
_ADDRESS = re.compile(r"([A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}")
_URL = re.compile(r"https?://[!-~]+")
_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_SWITCH = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def read_text(value: object) -> object:
    """Return None for the word ``none``; other values unchanged."""
    return None if value == "none" else value


def read_int(value: object) -> object:
    """Parse text as a whole number; return other values unchanged."""
    if isinstance(value, str):
        value = value.strip()
        return int(value) if _INT.fullmatch(value) else read_text(value)
    return value


def read_float(value: object) -> object:
    """Parse text as a number; return other values unchanged."""
    if isinstance(value, str):
        value = value.strip()
        return float(value) if _FLOAT.fullmatch(value) else read_text(value)
    return value


def read_seconds(value: object) -> object:
    """Parse text as seconds: a number, or a duration such as ``30s``; return other values unchanged."""
    return seconds_of(value) if isinstance(value, str) and _DURATION.fullmatch(value.strip()) else read_float(value)


def read_switch(value: object) -> object:
    """Parse a word such as ``yes`` or ``off`` as a bool; return other values unchanged."""
    return _SWITCH.get(value.strip().lower(), value) if isinstance(value, str) else value


def read_names(value: object) -> object:
    """Parse text as a comma-separated list; return other values unchanged."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",")) if value.strip() else ()
    return value


def read_parts(value: object) -> object:
    """Parse text as a comma-separated list, the word ``none`` as None; return other values unchanged."""
    return read_names(read_text(value))


def read_ranks(value: object) -> object:
    """Parse a number or comma-separated numbers as a tuple; ``all`` stays text, ``none`` becomes None."""
    if isinstance(value, int) and not isinstance(value, bool):
        return (value,)
    if isinstance(value, str):
        value = value.strip()
        if value in ("all", "none"):
            return read_text(value)
        value = read_names(value)
    if isinstance(value, tuple | list):
        return tuple(read_int(item) for item in cast("Sequence[Any]", value))
    return value


def without_duplicates(value: tuple[Any, ...] | str | None) -> tuple[Any, ...] | str | None:
    """Return a tuple without duplicates; other values unchanged."""
    return tuple(dict.fromkeys(value)) if isinstance(value, tuple) else value


def as_run_name(value: str | None) -> str | None:
    """Return a valid name of a run unchanged; raise ValueError for an invalid one."""
    if value is None:
        return None
    if not value.isprintable() or value != value.strip() or set(value) & set("/\\") or value in (".", ".."):
        raise ValueError("not a run name")
    return value


def as_duration(value: int | str | None) -> int | str | None:
    """Return a valid duration unchanged; raise ValueError if it is invalid or longer than a month."""
    if isinstance(value, str) and not 0 < seconds_of(value) <= MONTH_S:
        raise ValueError("not a duration")
    return value


def seconds_of(duration: str) -> float:
    """Return the seconds of a duration such as ``30s``, ``10min``, ``1.5h``, ``2d``; raise ValueError if invalid."""
    match = _DURATION.fullmatch(duration.strip())
    if match is None:
        raise ValueError("not a duration")
    return float(match[1]) * _SECONDS[match[2]]


def as_size(value: str | None) -> str | None:
    """Return a valid size unchanged; raise ValueError for an invalid one."""
    if value is not None and bytes_of(value) == 0:
        raise ValueError("not a size")
    return value


def as_path(value: str | None) -> str | None:
    """Return a path unchanged; raise ValueError if it has unprintable characters."""
    if value is not None and not value.isprintable():
        raise ValueError("not a path")
    return value


def as_module_name(value: str) -> str:
    """Return the dotted name of a module unchanged; raise ValueError for other text."""
    if not all(part.isidentifier() or part.isdecimal() for part in value.split(".")):
        raise ValueError("not a module's name")
    return value


def as_address(value: str | None) -> str | None:
    """Return a text ``HOST:PORT`` unchanged; raise ValueError for other text."""
    if value is not None and not _ADDRESS.fullmatch(value):
        raise ValueError("not HOST:PORT")
    return value


def as_url(value: str | None) -> str | None:
    """Return an http or https URL unchanged; raise ValueError for other text."""
    if value is not None and not _URL.fullmatch(value):
        raise ValueError("not a URL")
    return value


def as_identifier(value: str) -> str:
    """Return a Python name unchanged; raise ValueError for other text."""
    if not value.isidentifier() or iskeyword(value):
        raise ValueError("not a Python name")
    return value


Int = Annotated[int, Field(strict=True)]
Workers = Annotated[int, Field(strict=True, ge=1, le=MAX_WORKERS)]
Rank = Annotated[int, Field(strict=True, ge=0, lt=MAX_WORKERS)]
Ranks = Annotated[tuple[Rank, ...], Field(min_length=1)]
Float = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Switch = Annotated[bool, BeforeValidator(read_switch), Field(strict=True)]
Name = Annotated[str, AfterValidator(as_identifier), Field(strict=True, max_length=256)]
ModuleName = Annotated[str, AfterValidator(as_module_name), Field(strict=True, max_length=256)]
PathText = Annotated[
    Annotated[str, Field(strict=True, min_length=1, max_length=4096)] | None,
    BeforeValidator(read_text),
    AfterValidator(as_path),
]
