"""A pool for tests, and a listener that records its calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from accel_nb.pool.control.stop_escalation import RankResult
from accel_nb.pool.engine import WorkerSpec
from accel_nb.pool.local.engine import LocalEngine
from accel_nb.pool.pool import Pool

PROGRAM = "tests.support.programs:EvalProgram"
PRELOAD = ("tests.support.programs", "torch", "torch.distributed", "accel_nb.runtime.distributed.process_group")


class Recorder:
    """A listener that records all its calls."""

    def __init__(self) -> None:
        self.text: dict[tuple[int, str], bytes] = {}
        self.messages: list[tuple[int, str, dict[str, Any]]] = []
        self.events: list[Any] = []
        self.answers: list[RankResult] = []

    def on_output(self, rank: int, stream: str, data: bytes) -> None:
        self.text[rank, stream] = self.text.get((rank, stream), b"") + data

    def on_message(self, rank: int, topic: str, body: dict[str, Any]) -> None:
        self.messages.append((rank, topic, body))

    def on_events(self, events: Sequence[Any]) -> None:
        self.events += events

    def on_result(self, answer: RankResult) -> None:
        self.answers.append(answer)

    def tick(self) -> None:
        pass


@contextmanager
def running_pool(size: int, **options: Any) -> Iterator[tuple[Pool, LocalEngine]]:
    engine = LocalEngine(PROGRAM, preload=PRELOAD, **options)
    pool = None
    try:
        pool = Pool(engine, [WorkerSpec("cpu", 1)] * size)
        pool.wait_ready()
        yield pool, engine
    finally:
        if pool is not None:
            pool.close()
        else:
            engine.stop()


def run_code(pool: Pool, *codes: str, recorder: Recorder | None = None, **options: Any) -> tuple[list[RankResult], Any]:
    """Run the same code on every rank, or one code for each rank."""
    if len(codes) == 1:
        codes = codes * pool.size
    return pool.run("run", {rank: {"code": code} for rank, code in enumerate(codes)}, recorder or Recorder(), **options)


REDUCE = """
import torch, torch.distributed as dist
value = torch.ones(1)
dist.all_reduce(value)
result = value.item()
"""


def results(pool) -> list:
    answers, _ = run_code(pool, REDUCE)
    return sorted((answer.rank, answer.outcome, answer.body.get("result")) for answer in answers)


HEALTHY = [(0, "done", 2.0), (1, "done", 2.0)]
