"""Lines at the end of a run about the checkpoints that it has written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from accel_nb.checkpoint.interval import SaveCost
from accel_nb.config.byte_sizes import size_text


@dataclass(frozen=True, slots=True)
class CompletedSave:
    """A checkpoint that was written completely."""

    step: int
    url: str
    cost: SaveCost


def describe_saves(saved: Sequence[CompletedSave], folder: str | None, num_postponed: int) -> list[str]:
    """Return lines about the saved steps, their folder and cost, and how many saves were postponed."""
    lines: list[str] = []
    if saved:
        steps = [str(item.step) for item in saved]
        shown = [*steps[:2], "...", steps[-1]] if len(steps) > 4 else steps
        costs = [item.cost for item in saved]
        stall_s, write_s = max(cost.stall_s for cost in costs), max(cost.write_s for cost in costs)
        lines.append(
            f"saved step {', '.join(shown)} ({len(saved)}) in {folder or 'folders of their own'} · "
            f"{size_text(costs[-1].num_bytes)}, at most {_time(stall_s)} of the training's time, on disk after "
            f"{_time(write_s)}"
        )
    if num_postponed:
        lines.append(
            f"{num_postponed} save{'s' if num_postponed > 1 else ''} postponed until the previous one was written: a "
            "longer --every or a faster store saves more regularly"
        )
    return lines


def describe_unsaved(saved: Sequence[CompletedSave]) -> str:
    """Return a line about the newest checkpoint of a run that was interrupted in the middle of a step."""
    newest = f"step {saved[-1].step}" if saved else "the one in the folder, if there is one"
    return f"not saved at the interrupt: no end of a step was near on every rank; the newest checkpoint is {newest}"


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
