"""Parts of error messages: values, paths and suggestions as short printable text."""

import os
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import cast

from accel_nb.secrets import hide_secrets


def quoted(value: object) -> str:
    """Return the value as printable text of at most 60 characters, without secrets."""
    if value is None:
        return "none"
    try:
        text = value if isinstance(value, str) and value.isprintable() and value and " " not in value else ascii(value)
    except Exception:  # the repr of a user's object may raise, as for an integer with too many digits
        text = f"a value of type {type(value).__name__}"
    text = hide_secrets(text)  # before the text is cut, since a part of a secret would not be recognized
    return text if len(text) <= 60 else text[:57] + "..."


def path_text(path: str | os.PathLike[str]) -> str:
    """Return a path as printable text of at most 300 characters."""
    text = os.fspath(path)
    text = text if text.isprintable() else ascii(text)
    return text if len(text) <= 300 else "..." + text[-297:]


def ranks_text(ranks: Iterable[int]) -> str:
    """Return ranks as in ``rank 1``, ``ranks 0 and 2`` or ``ranks 0, 1 and 3``."""
    *most, last = map(str, sorted(ranks))
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


def did_you_mean(name: str, known: Mapping[str, str] | Iterable[str]) -> str:
    """Return ``"; did you mean X?"`` with the nearest known name, or an empty string.

    A mapping maps each known name to the text to suggest. The last part of a dotted name counts as a name too.
    """
    names: dict[str, str] = (
        dict(cast("Mapping[str, str]", known)) if isinstance(known, Mapping) else {item: item for item in known}
    )
    names = {item.rpartition(".")[2]: suggestion for item, suggestion in reversed(names.items())} | names
    near = get_close_matches(name[:80], names, n=1)
    return f"; did you mean {names[near[0]]}?" if near else ""
