"""Detection, at the end of a cell, of replicas and values that have diverged on the workers."""

from __future__ import annotations

from collections.abc import Sequence

from accel_nb.notebook.messages import RankAnswer


def find_different_names(answers: Sequence[RankAnswer]) -> list[str]:
    """Return the names whose values differ among the ranks, if all have finished the cell."""
    if not answers or not all(answer.is_complete for answer in answers):
        return []
    first, *others = [answer.reply.values for answer in answers]
    return [name for name, digest in first.items() if any(values.get(name) != digest for values in others)]


def describe_divergence(answers: Sequence[RankAnswer]) -> list[str]:
    """Return a warning if the ranks that finished the cell have different weights of the trained models."""
    reported = [answer.reply.fingerprints for answer in answers if answer.is_complete]
    if len(reported) < len(answers) or all(fingerprints == reported[0] for fingerprints in reported):
        return []
    return [
        "the workers' weights differ after this cell, and the notebook has rank 0's: a value that differs between "
        "ranks (the loss of a share, a random number, one that torch.linalg.lstsq rounds) has set a learning rate or "
        "changed weights. Use a value that is equal on all, from an evaluation under torch.no_grad() or "
        "accelerator.reduce(tensor, 'mean'). "
        "`%accelerate push NAMES` sends the notebook's model and optimizer to every worker"
    ]
