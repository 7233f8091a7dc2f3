"""Notices at the end of a cell that the workers no longer train one model."""

from __future__ import annotations

from collections.abc import Sequence

from accel_nb.pool.control.stop_escalation import Answer


def drift_lines(answers: Sequence[Answer]) -> list[str]:
    """Return a line if ranks that ended the cell hold different weights of what it has trained."""
    told = [answer.body.get("fingerprints") for answer in answers if answer.outcome == "done"]
    if len(told) < len(answers) or all(fingerprints == told[0] for fingerprints in told):
        return []
    return [
        "the workers' weights differ after this cell, and the notebook has rank 0's: something that is not equal on "
        "all of them (the loss of a share, a random number) has set a learning rate or changed weights. Decide by "
        "what is equal on all, an evaluation under torch.no_grad() or accelerator.reduce(tensor, 'mean'). "
        "`%accelerate push NAMES` gives every worker the notebook's model and optimizer"
    ]
