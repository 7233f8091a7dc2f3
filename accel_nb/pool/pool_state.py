"""The states of a pool and the legal transitions between them."""

from __future__ import annotations

from typing import Literal

from accel_nb.errors import IllegalTransition

PoolState = Literal["starting", "ready", "busy", "failed", "closed"]

_TRANSITIONS: dict[PoolState, frozenset[PoolState]] = {
    "starting": frozenset({"ready", "failed", "closed"}),
    "ready": frozenset({"busy", "starting", "failed", "closed"}),
    "busy": frozenset({"ready", "starting", "failed", "closed"}),
    "failed": frozenset({"starting", "closed"}),
    "closed": frozenset({"closed"}),
}


def transition(current: PoolState, target: PoolState) -> PoolState:
    """Return ``target`` if the transition from ``current`` is legal; raise IllegalTransition otherwise."""
    if target not in _TRANSITIONS[current]:
        raise IllegalTransition(
            f"a pool that is {current!r} cannot become {target!r}; "
            f"it can become {', '.join(sorted(_TRANSITIONS[current]))}"
        )
    return target
