"""Calls of a model, grouped by values that its code may branch on: kinds and sizes of arguments, and plain values.

A row layout is found for each group. Some values are new in every call, such as a noise level or the length of a text:
after `_NUM_STATES` groups with equal layouts only each second, fourth, eighth and so on new group is checked.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from torch import nn

from accel_nb.accelerator.model_division.plain_state import PlainState
from accel_nb.accelerator.model_division.row_layout import DivisionRefusal, RowLayout

_NUM_STATES = 16


@dataclass
class CallGroup:
    """The calls of a model with arguments of one signature and one state."""

    layout: RowLayout | DivisionRefusal | None = None
    """The row layout, or why the calls are not divided; None: not known yet."""
    num_calls: int = 0
    num_divided: int = 0

    @property
    def is_checked_now(self) -> bool:
        """Whether the current call is the first, the second, the fourth, and so on."""
        return not self.num_calls & (self.num_calls - 1)


@dataclass
class _Signature:
    groups: dict[Hashable, CallGroup] = field(default_factory=dict)
    num_states: int = 0
    last: CallGroup | None = None


class CallsByState:
    """The groups of a model's calls.

    It references the model, so only the model may reference it; otherwise the model would never be released.
    """

    def __init__(self) -> None:
        self._state: PlainState | None = None
        self._signatures: dict[Hashable, _Signature] = {}

    def find(self, model: nn.Module, signature: Hashable, values: Hashable) -> CallGroup:
        """Return the group of a call, and count the call; ``values`` are the sizes and numbers of its arguments."""
        if self._state is None or not self._state.is_current:
            self._state = PlainState(model)
        of_signature = self._signatures.get(signature)
        if of_signature is None:
            of_signature = self._signatures[signature] = _Signature()
        state = values, self._state.values()
        group = of_signature.groups.get(state)
        if group is None:
            group = self._add(of_signature, state)
        group.num_calls += 1
        of_signature.last = group
        return group

    def _add(self, of_signature: _Signature, state: Hashable) -> CallGroup:
        of_signature.num_states = number = of_signature.num_states + 1
        last = of_signature.last
        if last is not None and number > _NUM_STATES and number & (number - 1) and _has_one_layout(of_signature):
            return last
        group = of_signature.groups[state] = CallGroup()
        return group


def _has_one_layout(of_signature: _Signature) -> bool:
    """Return whether all groups have the same layout; a refusal in one of them means that the state matters."""
    layouts = [group.layout for group in of_signature.groups.values() if group.layout is not None]
    return all(layout == layouts[0] for layout in layouts)
