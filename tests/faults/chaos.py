"""Many faults drawn by chance against one pool, and very many requests without any: ``python -m tests.faults.chaos``.

Options: ``--faults N`` and ``--requests N``, 200 and 10,000 by default. The tests run a few of each.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import psutil

from accel_nb.pool.local.engine import LocalEngine
from accel_nb.pool.pool import Pool
from tests.support.pools import run_code, running_pool

REDUCE = "import torch, torch.distributed as dist\nvalue = torch.ones(1)\ndist.all_reduce(value)\nresult = value.item()"
WAIT = "import threading; threading.Event().wait(100)"
FAULTS = {
    "raise": ("raise ValueError('chance')", False),
    "exit": ("import os; os._exit(3)", False),
    "abort": ("import os; os.abort()", False),
    "segfault": ("import ctypes; ctypes.string_at(0)", False),
    "kill": ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", False),
    "sleep": (WAIT, True),
    "loop": ("while True: pass", True),
    "stop": ("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", True),
}
"""What one rank does while the others reduce, and whether the user has to interrupt."""
WEDGED_S = 120
"""After how long without an answer a pool counts as wedged."""


@dataclass
class Outcome:
    """How the faults ended."""

    num_recovered: int = 0
    num_faults: int = 0
    recovery_s: list[float] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    wedged: str | None = None


class Wedged(Exception):
    """The pool does not answer."""


@contextmanager
def alarmed() -> Iterator[None]:
    """Raise `Wedged` in the block when it takes far too long; main thread only."""

    def ring(signum: int, frame: object) -> None:
        raise Wedged

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(WEDGED_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def chaos(
    pool: Pool, num_faults: int, seed: int, limit: Callable[[], AbstractContextManager[None]] = nullcontext
) -> Outcome:
    """Do so many faults to ranks drawn by chance; after each the pool must reduce over all ranks again.

    ``limit`` is around each of them; one that it ends with `Wedged` is the last.
    """
    chance, outcome = random.Random(seed), Outcome(num_faults=num_faults)
    for _ in range(num_faults):
        name, victim = chance.choice(list(FAULTS)), chance.randrange(pool.size)
        code, needs_interrupt = FAULTS[name]
        at = time.monotonic() + chance.uniform(0.05, 0.3)
        codes = [code if rank == victim else REDUCE for rank in range(pool.size)]
        started = time.monotonic()
        try:
            with limit():
                run_code(
                    pool,
                    *codes,
                    num_interrupts=lambda at=at, needed=needs_interrupt: int(needed and time.monotonic() > at),
                )
                answers, reason = run_code(pool, REDUCE)
        except Wedged:
            outcome.wedged = f"{name} of rank {victim}, the {len(outcome.recovery_s) + 1}th fault"
            return outcome
        outcome.recovery_s.append(time.monotonic() - started)
        if reason is None and [answer.body.get("result") for answer in answers] == [float(pool.size)] * pool.size:
            outcome.num_recovered += 1
        else:
            outcome.lost.append(name)
    return outcome


@dataclass
class Growth:
    """What very many requests left behind in this process, and how their time drifted."""

    num_descriptors: int
    rss_bytes: int
    drift: float


def soak(pool: Pool, num_requests: int) -> Growth:
    """Run so many requests and compare the end with the beginning."""
    here = psutil.Process()
    times: list[float] = []
    for _ in range(num_requests // 10):
        run_code(pool, "result = 1")
    gc.collect()  # What earlier work of this process still holds open is not part of the growth.
    descriptors, rss = len(os.listdir("/proc/self/fd")), here.memory_info().rss
    for _ in range(num_requests):
        started = time.monotonic()
        run_code(pool, "result = 1")
        times.append(time.monotonic() - started)
    gc.collect()
    fifth = max(1, num_requests // 5)
    return Growth(
        len(os.listdir("/proc/self/fd")) - descriptors,
        here.memory_info().rss - rss,
        statistics.median(times[-fifth:]) / statistics.median(times[:fifth]) - 1,
    )


def descendants(engine: LocalEngine) -> list[psutil.Process]:
    """Return every process of a pool."""
    zygote = psutil.Process(engine.zygote_pid)
    return [zygote, *zygote.children(recursive=True)]


def main() -> None:
    """Run both at length and print what came out as JSON; the exit status is 1 if it is not what is wanted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with running_pool(3) as (pool, engine):
        outcome = chaos(pool, options.faults, options.seed, alarmed)
        processes = descendants(engine)
        growth = Growth(0, 0, 0.0) if outcome.wedged else soak(pool, options.requests)
    _, alive = psutil.wait_procs(processes, timeout=5)
    ordered = sorted(outcome.recovery_s) or [0.0]
    p99_s = ordered[int(len(ordered) * 0.99)]
    print(
        json.dumps(
            {
                "recovered": f"{outcome.num_recovered} of {outcome.num_faults}",
                "lost": outcome.lost,
                "wedged": outcome.wedged,
                "median_s": round(statistics.median(ordered), 3),
                "p99_s": round(p99_s, 3),
                "orphans": len(alive),
                "descriptors": growth.num_descriptors,
                "rss_mb": round(growth.rss_bytes / 1e6, 1),
                "drift": round(growth.drift, 3),
            }
        )
    )
    is_recovered = outcome.num_recovered >= 0.99 * outcome.num_faults and p99_s <= 10
    is_clean = not alive and growth.num_descriptors <= 0 and growth.rss_bytes <= 20_000_000
    sys.exit(0 if is_recovered and is_clean else 1)


if __name__ == "__main__":
    main()
