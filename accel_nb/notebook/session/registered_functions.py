"""Filters of loggers and formatters of displays that a notebook or a cell has defined: each process has its own."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from IPython.core.getipython import get_ipython

_OF_CELL = (
    "{label}, which the cell has registered, has an effect in %%accelerate cells only: register it in a cell without "
    "%%accelerate for the notebook"
)
_OF_NOTEBOOK = (
    "{label}, which the notebook has registered, has no effect on the workers: register it in a cell with "
    "%%accelerate for these"
)


class RegisteredFunctions:
    """The user's functions that are registered in this process, and those of them that were reported."""

    def __init__(self, *, knows_present: bool) -> None:
        """Begin; with ``knows_present`` the functions that are registered now count as reported."""
        self._known = {key for key, _ in _find_functions()} if knows_present else set()

    def describe_new(self, *, is_worker: bool) -> list[str]:
        """Return a line for each function that was registered since the last call."""
        found = dict(_find_functions())
        new = [label for key, label in found.items() if key not in self._known]
        self._known = set(found)
        return [(_OF_CELL if is_worker else _OF_NOTEBOOK).format(label=label) for label in dict.fromkeys(new)]


def _find_functions() -> Iterator[tuple[tuple[str, int], str]]:
    """Yield a key and a description of each function of the user that is registered."""
    loggers = [item for item in list(logging.root.manager.loggerDict.values()) if isinstance(item, logging.Logger)]
    for logger in (logging.root, *loggers):
        for item in logger.filters:
            if _is_of_user(item):
                label = f"the filter {_name_of(item)} of the logger {logger.name!r}"
                yield (label, id(item)), label
    shell: Any = get_ipython()
    for kind, formatter in {} if shell is None else shell.display_formatter.formatters.items():
        for shown, function in [*formatter.type_printers.items(), *formatter.deferred_printers.items()]:
            if _is_of_user(function):
                label = f"the formatter of {_name_of(shown)} as {kind}"
                yield (label, id(function)), label


def _is_of_user(item: Any) -> bool:
    kind = type(item)
    return kind is logging.Filter or "__main__" in (kind.__module__, getattr(item, "__module__", None))


def _name_of(item: Any) -> str:
    return ".".join(item) if isinstance(item, tuple) else getattr(item, "__name__", type(item).__name__)
