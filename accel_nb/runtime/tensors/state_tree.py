"""State trees as ``state_dict`` returns them: nested dicts, lists and tuples of tensors and plain values."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any


def map_state(fn: Callable[[Any], Any], state: Any) -> Any:
    """Return a state tree with ``fn`` applied to each leaf; nothing is changed in place.

    Dicts, lists and tuples are new objects. An `OrderedDict` or `Counter` keeps its type and attributes (a module's
    state dict has ``_metadata``); other subclasses of dict and list become plain ones. Subclasses of tuple are leaves.
    """
    if isinstance(state, OrderedDict | Counter):
        result: Any = copy.copy(state)
        for key, value in state.items():
            result[key] = map_state(fn, value)
        return result
    if isinstance(state, dict):
        return {key: map_state(fn, value) for key, value in state.items()}
    if isinstance(state, list):
        return [map_state(fn, value) for value in state]
    if type(state) is tuple:
        return tuple([map_state(fn, value) for value in state])
    return fn(state)
