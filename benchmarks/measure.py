"""Shared by the benchmarks: robust statistics, tables with figures to reach, and a real notebook kernel."""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from jupyter_client.manager import KernelManager

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Figure:
    """A measured number with its target: ``value`` must be at most, or at least, ``limit``."""

    what: str
    value: float
    limit: float
    unit: str
    sense: Literal["at most", "at least"] = "at most"
    spread: tuple[float, float] | None = None
    """The 95 % confidence interval of the value, if it was computed."""

    @property
    def is_met(self) -> bool:
        """Whether the measured value is on the right side of the limit."""
        return self.value <= self.limit if self.sense == "at most" else self.value >= self.limit

    def cells(self) -> list[str]:
        """Return the row of this figure in a table."""
        value = number(self.value)
        if self.spread is not None:
            value += f" ({number(self.spread[0])} to {number(self.spread[1])})"
        return [self.what, f"{value} {self.unit}", f"{self.sense} {number(self.limit)} {self.unit}", self._verdict()]

    def _verdict(self) -> str:
        if self.spread is not None and self.spread[0] <= self.limit <= self.spread[1]:
            return "met, within noise" if self.is_met else "not met, within noise"
        return "met" if self.is_met else "NOT MET"


@dataclass
class Report:
    """The answer to one question."""

    title: str
    question: str
    head: list[str]
    rows: list[list[str]] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, *cells: object) -> None:
        """Add a row; numbers are shortened."""
        self.rows.append([number(cell) if isinstance(cell, float) else str(cell) for cell in cells])

    def markdown(self) -> str:
        """Return the report as Markdown that is readable as plain text too."""
        parts = [f"## {self.title}", self.question, table(self.head, self.rows)]
        if self.figures:
            parts.append(table(["figure", "measured", "to reach", ""], [figure.cells() for figure in self.figures]))
        parts += [f"- {note}" for note in self.notes]
        return "\n\n".join(parts) + "\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table with aligned columns."""
    lines = [list(head), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    texts = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    ]
    texts.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(texts)


def number(value: float) -> str:
    """Return a number with three significant digits."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:#.3g}".rstrip(".")


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value below which ``share`` of the values lie, interpolated."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def median_interval(values: Sequence[float], *, draws: int = 2000) -> tuple[float, float]:
    """Return a bootstrap 95 % interval of the median."""
    rng = random.Random(0)
    medians = [statistics.median(rng.choices(values, k=len(values))) for _ in range(draws)]
    return quantile(medians, 0.025), quantile(medians, 0.975)


def shuffled_rounds(names: Sequence[str], num_rounds: int, *, seed: int = 0) -> Iterator[list[str]]:
    """Yield the contestants in a new order for each round; the same on every rank that uses the same seed."""
    rng = random.Random(seed)
    for _ in range(num_rounds):
        order = list(names)
        rng.shuffle(order)
        yield order


def open_group(rank: int, folder: Path) -> Any:
    """Open the group of two ranks as workers do, on the processor; return it, to be closed."""
    from accel_nb.runtime.distributed.process_group import DefaultGroup
    from accel_nb.runtime.world import World

    return DefaultGroup.open(World(rank, 2, rank, 2), folder / "store")


def on_two_ranks(module: str, rounds: int, *, timeout_s: float = 400) -> Any:
    """Run ``python -m module --rank R FOLDER ROUNDS`` as two gloo ranks; return rank 0's file ``0.json``."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", module, "--rank", str(rank), folder, str(rounds)],
                cwd=ROOT,
                env={
                    **os.environ,
                    "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
                    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "GLOO_SOCKET_IFNAME": "lo",
                    "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "PYTHONWARNINGS": "ignore",
                },
            )
            for rank in (0, 1)
        ]  # fmt: skip
        try:
            codes = [process.wait(timeout=timeout_s) for process in ranks]
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        if any(codes):
            raise RuntimeError(f"the ranks ended with {codes}")
        return json.loads((Path(folder) / "0.json").read_text())


Pairs = Sequence[Sequence[float]]
"""Measurements of several pairs of processes, a list for each."""


def quiet_difference(own: Pairs, base: Pairs, share: float, draws: int = 1000) -> tuple[float, ...]:
    """Return the difference of the lower quantiles at ``share``, and its 95 % bootstrap interval.

    The mean over processes is used, since times differ more between processes, by the memory layout of their code,
    than within one. The bootstrap draws processes, and blocks within them.
    """
    pairs = list(zip(own, base, strict=True))
    drawer = random.Random(0)

    def draw(values: Sequence[float]) -> float:
        return quantile(drawer.choices(values, k=len(values)), share)

    drawn = sorted(
        statistics.fmean(draw(ours) - draw(theirs) for ours, theirs in drawer.choices(pairs, k=len(pairs)))
        for _ in range(draws)
    )
    found = statistics.fmean(quantile(ours, share) - quantile(theirs, share) for ours, theirs in pairs)
    return found, drawn[draws // 40], drawn[-draws // 40]


class CellFailed(RuntimeError):
    """Code raised in the kernel."""


class Kernel:
    """A real notebook kernel, driven as a front end drives it."""

    def __init__(self, manager: KernelManager) -> None:
        self._manager = manager
        self._client = manager.blocking_client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=120)

    def run(self, code: str, answer: str = "None", *, timeout_s: float = 300) -> Any:
        """Run a cell and return the value of the expression ``answer``, transferred as JSON."""
        expressions = {"answer": f"__import__('json').dumps({answer})"}
        request = self._client.execute(code, user_expressions=expressions, store_history=True)
        deadline = time.monotonic() + timeout_s
        texts: list[str] = []
        while True:  # until idle, so that no message of this cell arrives during the next
            message = self._client.get_iopub_msg(timeout=max(0.1, deadline - time.monotonic()))
            if message["parent_header"].get("msg_id") != request:
                continue
            content = message["content"]
            if message["msg_type"] == "stream":
                texts.append(content["text"])
            elif message["msg_type"] == "status" and content["execution_state"] == "idle":
                break
        while (reply := self._client.get_shell_msg(timeout=30))["parent_header"].get("msg_id") != request:
            pass
        content = reply["content"]
        if content["status"] != "ok":
            raise CellFailed("\n".join([*texts, *content.get("traceback", [])]))
        outcome = content["user_expressions"]["answer"]
        if outcome["status"] != "ok":
            raise CellFailed("\n".join(outcome["traceback"]))
        text = outcome["data"]["text/plain"]
        return json.loads(_unquoted(text))

    def close(self) -> None:
        """End the kernel and the processes that it started."""
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=False)
        self._manager.cleanup_resources()


def _unquoted(text: str) -> str:
    import ast

    return ast.literal_eval(text)


@contextmanager
def running_kernel() -> Iterator[Kernel]:
    """Start a kernel with an IPython folder of its own, in the repository's root."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        manager = KernelManager(kernel_name="python3")
        manager.start_kernel(
            cwd=str(ROOT),
            env={**os.environ, "IPYTHONDIR": folder, "PYTHONPATH": str(ROOT)},
            stderr=subprocess.DEVNULL,
        )
        kernel = None
        try:
            kernel = Kernel(manager)
            yield kernel
        finally:
            if kernel is not None:
                kernel.close()
            elif manager.has_kernel:
                manager.shutdown_kernel(now=True)


CELL_HELPERS = """
import time
_ip = get_ipython()
def _cell(line, text):
    started = time.perf_counter()
    _ip.run_cell_magic("accelerate", line, text)
    return time.perf_counter() - started
def _session():
    return _ip.magics_manager.registry["AccelerateMagics"].session
def _wait_warm():
    # Wait until the zygote has reported that it can fork.
    started, session = time.perf_counter(), _session()
    session.poll()
    while session.status().state == "warming up":
        time.sleep(0.001)
        session.poll()
    return time.perf_counter() - started
"""


def main(answer: Callable[[bool], Report]) -> None:
    """Run one benchmark as a program: ``[--quick] [--json FILE]``."""
    parser = argparse.ArgumentParser(description=answer.__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, for a first look")
    parser.add_argument("--json", type=Path, help="also write the report there")
    options = parser.parse_args()
    report = answer(options.quick)
    print(report.markdown())
    if options.json:
        options.json.write_text(json.dumps(asdict(report)))


def load_report(path: Path) -> Report:
    """Read back what `main` wrote."""
    fields = json.loads(path.read_text())
    figures = [
        Figure(**{**item, "spread": tuple(item["spread"]) if item["spread"] else None}) for item in fields["figures"]
    ]
    return Report(**{**fields, "figures": figures})
