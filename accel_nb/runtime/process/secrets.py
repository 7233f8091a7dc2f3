"""Hiding secrets in what leaves a process: reports, logs, stored options, trackers, lines of our own in the notebook.

What a cell prints, and the errors of a cell's own code, are the user's and are left as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from accel_nb.runtime.process.environment import secret_values
from accel_nb.secrets import HIDDEN, hide_secrets, is_secret, names_secret


def redact(text: str) -> str:
    """Return the text with ``***`` in place of secrets: those of the environment, and what looks like one."""
    for value in secret_values():
        text = text.replace(value, HIDDEN)
    return hide_secrets(text)


def redacted_words(words: Sequence[str]) -> tuple[str, ...]:
    """Return the words of a command line with their secrets hidden: ``--hf-token ***``."""
    return tuple(
        HIDDEN if before.startswith("-") and names_secret(before) and not word.startswith("-") else redact(word)
        for before, word in zip(("", *words), words, strict=False)
    )


def redacted(value: Any, name: str = "") -> Any:
    """Return a value with the secrets of its texts hidden, at any depth of mappings, lists and tuples.

    A text under a ``name`` that says secret is hidden whole; numbers are kept. What is of another kind stays as it is.
    """
    if isinstance(value, str):
        return HIDDEN if is_secret(name, value) else redact(value)
    if isinstance(value, Mapping):
        return {key: redacted(item, str(key)) for key, item in value.items()}  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    if type(value) in (list, tuple):
        return type(value)(redacted(item, name) for item in value)
    return value
