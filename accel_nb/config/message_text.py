"""Parts of error messages: values, paths and suggestions as one short printable piece of text each."""

import os
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import cast

from accel_nb.secrets import hide_secrets


def quoted(value: object) -> str:
    """Return the value as one short printable piece of text."""
    if value is None:
        return "none"
    try:
        text = value if isinstance(value, str) and value.isprintable() and value and " " not in value else ascii(value)
    except Exception:  # the repr of a user's object may raise, and that of a number with too many digits does
        text = f"a value of type {type(value).__name__}"
    text = hide_secrets(text)  # before cutting: a part of a secret is not recognized as one
    return text if len(text) <= 60 else text[:57] + "..."


def path_text(path: str | os.PathLike[str]) -> str:
    """Return a path as printable text of at most 300 characters."""
    text = os.fspath(path)
    text = text if text.isprintable() else ascii(text)
    return text if len(text) <= 300 else "..." + text[-297:]


def did_you_mean(name: str, known: Mapping[str, str] | Iterable[str]) -> str:
    """Return ``"; did you mean X?"`` with the nearest known name, or an empty string.

    A mapping maps what may have been meant to what to suggest. The last part of a dotted name counts as a name too.
    """
    names: dict[str, str] = (
        dict(cast("Mapping[str, str]", known)) if isinstance(known, Mapping) else {item: item for item in known}
    )
    names = {item.rpartition(".")[2]: meant for item, meant in reversed(names.items())} | names
    near = get_close_matches(name[:80], names, n=1)
    return f"; did you mean {names[near[0]]}?" if near else ""
