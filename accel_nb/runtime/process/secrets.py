"""Redaction of secrets in reports, logs, stored options, trackers and lines that this package prints.

The output of a cell's code and its errors are not changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from accel_nb.runtime.process.environment import secret_values
from accel_nb.secrets import HIDDEN, flag_takes_secret, hide_secrets, is_secret


def redact(text: str) -> str:
    """Return the text with ``***`` in place of secrets: values of the environment, and known patterns."""
    for value in secret_values():
        text = text.replace(value, HIDDEN)
    return hide_secrets(text)


def redact_command_line(words: Sequence[str]) -> tuple[str, ...]:
    """Return the words of a command line with their secrets hidden: ``--hf-token ***``."""
    return tuple(
        HIDDEN if flag_takes_secret(before) and not word.startswith("-") else redact(word)
        for before, word in zip(("", *words), words, strict=False)
    )


def redacted(value: Any, name: str = "") -> Any:
    """Return a value with the secrets of its strings hidden, at any depth of mappings, lists and tuples.

    A text is hidden completely if ``name`` is the name of a secret. Values of other types are unchanged.
    """
    if isinstance(value, str):
        return HIDDEN if is_secret(name, value) else redact(value)
    if isinstance(value, Mapping):
        return {key: redacted(item, str(key)) for key, item in value.items()}  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    if type(value) in (list, tuple):
        return type(value)(redacted(item, name) for item in value)
    return value
