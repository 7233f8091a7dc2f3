"""The cost of a save and the best interval between saves (Young and Daly). Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SaveCost:
    """The cost of one save: it blocked the training for ``stall_s`` seconds, and was durable after ``write_s``."""

    num_bytes: int
    stall_s: float
    write_s: float

    def interval_s(self, failure_s: float) -> float:
        """Return the seconds of training between saves that minimize the loss; see `best_interval`.

        A background save blocks the training only for its stall, but until it is durable, recovery uses the previous
        one: the interval is never shorter than ``write_s``.
        """
        return max(best_interval(self.stall_s, failure_s), self.write_s)


def best_interval(save_s: float, failure_s: float) -> float:
    """Return the seconds of work between two saves that minimize the time lost to saves and to repeated work.

    Args:
        save_s: How long a save blocks the work.
        failure_s: The mean time between failures.

    Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps" (2006), equation 37: Young's
    sqrt(2 x save x failure) is its first term. Raises ValueError if ``save_s`` is negative, or
    ``failure_s`` not above 0.
    """
    if not (save_s >= 0 and failure_s > 0 and math.isfinite(save_s) and math.isfinite(failure_s)):
        raise ValueError(
            f"a save of {save_s!r} s and a failure each {failure_s!r} s: both must be finite, the first not negative, "
            "the second above 0"
        )
    if save_s >= 2 * failure_s:
        return failure_s
    ratio = save_s / (2 * failure_s)
    return math.sqrt(2 * save_s * failure_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s
