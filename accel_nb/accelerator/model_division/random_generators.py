"""States of random generators that user code has made: `random.Random`, NumPy's and torch's generator objects."""

from __future__ import annotations

import copy
import random
import sys
from typing import Any

import torch


def is_generator(value: Any) -> bool:
    """Return whether a value is a random generator whose state can be read and set."""
    if isinstance(value, random.Random | torch.Generator):
        return True
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.random.Generator | numpy.random.RandomState)


def state_of(generator: Any) -> Any:
    """Return a copy of a generator's state."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, torch.Generator):
        return generator.get_state().clone()
    if hasattr(generator, "bit_generator"):
        return copy.deepcopy(generator.bit_generator.state)
    return generator.get_state(legacy=False)


def set_state(generator: Any, state: Any) -> None:
    """Set a generator to a state that `state_of` has returned."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def has_state(generator: Any, state: Any) -> bool:
    """Return whether a generator has the state that `state_of` has returned."""
    current = state_of(generator)
    return torch.equal(current, state) if isinstance(current, torch.Tensor) else repr(current) == repr(state)
