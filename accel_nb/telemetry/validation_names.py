"""Names of validation losses, which are drawn with their training loss."""

from __future__ import annotations

import re
from collections.abc import Sequence

_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[0-9]+")
_VALIDATION = frozenset({"val", "valid", "validation", "eval", "evaluation", "dev", "holdout", "test"})
_TRAINING = frozenset({"train", "training"})


def find_training_loss(metric: str, loss_names: Sequence[str]) -> str | None:
    """Return the loss of which a metric is the validation loss, such as ``loss`` for ``val/loss``; None if of none.

    Without its words for validation the metric has the name of the loss, or is just ``loss``: that is the first one. A
    number at its end may distinguish several loops.
    """
    words = _words(metric)
    rest = [word for word in words if word not in _VALIDATION]
    if len(rest) == len(words):
        return None
    rest = [word for word in rest if word not in _TRAINING]
    numbered = rest[:-1] if rest and rest[-1].isdigit() else rest
    for wanted in (rest, numbered):
        for name in loss_names:
            if wanted == [word for word in _words(name or "loss") if word not in _TRAINING]:
                return name
    return loss_names[0] if loss_names and numbered == ["loss"] else None


def _words(name: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(name)]
