"""Runs a program plainly and on workers, and classifies the outcome."""

from __future__ import annotations

import contextlib
import io
import math
import re
import traceback
import warnings
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tests.properties.program import Program
from tests.properties.workers import Workers
from tests.realworld.values import MISSING, Entries, collect_values, differences
from tests.realworld.verdict import OF_SHARE, Run, is_refusal, lines_of_ours, remarks
from tests.support.kernel import Output

TOLERANCE = 1e-9
Kind = Literal["equal", "told", "refused", "failed", "silent", "invalid"]
"""The outcomes; ``invalid`` is a program that fails on one device or ends in NaN there."""
KINDS: tuple[Kind, ...] = get_args(Kind)
BAD: tuple[Kind, ...] = ("failed", "silent", "invalid")
_NUMBER = re.compile(r"(?<![\w.])-?(?:\d+\.?\d*(?:e[+-]?\d+)?|inf|nan)(?![\w.])", re.IGNORECASE)
_OF_SHARES = ("history", "printed")
_ROUNDING = 50
"""How much more than the effect of rounding errors a difference may be."""
_EXCUSES: dict[str, dict[str, tuple[str, ...]]] = {
    "random numbers are drawn": {
        "noise": ("normal", "mixed", "dropped"),
        "encoder": ("dropout", "noise", "conv dropout", "transformer with dropout"),
        "interface": (
            "noise input", "two views", "two views in one call", "variational", "gan", "critic", "reordered rows",
            "differential equation",
        ),
        "iteration": ("inner batches",),
    },
    "hooks on gradients": {
        "hooks": ("hooks on parameters", "full backward hook", "hook on the output", "gradient statistics"),
    },
    "changes buffers": {
        "encoder": ("batch norm", "conv batch norm", "spectral norm", "running mean", "queue"),
    },
}  # fmt: skip
"""For a warning that names a cause: the choices that are this cause. It explains no difference of other programs."""


@dataclass(frozen=True)
class Verdict:
    """What became of one program on some number of workers."""

    program: Program
    workers: int
    kind: Kind
    reasons: tuple[str, ...] = ()
    """The differences, or the error."""
    said: tuple[str, ...] = ()
    """The lines that accel_nb put out about them."""
    is_repeated: bool = True
    """Whether fresh workers end the same; where not, an earlier program had an effect."""


class Runner:
    """Judges programs. Bad outcomes are repeated on fresh workers, which no earlier program has used."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._plain: tuple[Program, Run] | None = None

    @property
    def num_workers(self) -> int:
        """The number of workers that run."""
        return self._workers.size

    def judge(self, program: Program, workers: int) -> Verdict:
        """Return the outcome of a program on so many workers."""
        if self._workers.size != workers:
            self._workers.start(workers)
        if self._plain is None or self._plain[0] is not program:
            self._plain = program, run_plain(program)
        verdict = self._judge(program, self._plain[1])
        if verdict.kind not in ("failed", "silent"):
            return verdict
        self._workers.start(workers)
        again = self._judge(program, self._plain[1])
        if again.kind == verdict.kind:
            return again
        return Verdict(program, workers, verdict.kind, verdict.reasons, verdict.said, is_repeated=False)

    def _judge(self, program: Program, plain: Run) -> Verdict:
        workers = self._workers.size
        if plain.failed is not None:
            return Verdict(program, workers, "invalid", (plain.failed.traceback,))
        if any(map(math.isnan, _numbers(plain.values))):
            return Verdict(program, workers, "invalid", ("the plain run ends in NaN, which compares equal to NaN",))
        output, values = self._workers.run(program.source, program.compare)
        put_out = lines_of_ours(plain, Run(outputs=[output]))
        said = tuple(line for line in remarks(put_out) if explains(line, program))
        if output.error is not None:
            kind: Kind = "refused" if is_refusal(output) else "failed"
            return Verdict(program, workers, kind, (": ".join(output.error), output.traceback), said)
        expected, found = dict(plain.values), {**values[0], **printed_values(output.stdout)}
        for rank, entries in enumerate(values[1:], 1):
            for path in {path for path in (*values[0], *entries) if not path.startswith(_OF_SHARES)}:
                expected[f"{path} of rank {rank}"] = values[0].get(path, MISSING)
                found[f"{path} of rank {rank}"] = entries.get(path, MISSING)
        reasons = differences(expected, found, TOLERANCE)
        if not reasons:
            return Verdict(program, workers, "equal", (), said)
        if OF_SHARE in put_out and all(line.startswith(_OF_SHARES) for line in reasons):
            said = (*said, OF_SHARE)
        if not said and self._is_rounding(program, plain.values, largest_difference(expected, found)):
            return Verdict(program, workers, "equal")
        return Verdict(program, workers, "told" if said else "silent", tuple(reasons), said)

    def _is_rounding(self, program: Program, plain: Entries, difference: float) -> bool:
        """Return whether rounding errors of the plain run's weights have an effect of the same size."""
        nudged = run_plain(program, nudge=1e-15)
        return nudged.failed is None and difference <= _ROUNDING * largest_difference(plain, nudged.values) < math.inf


def explains(line: str, program: Program) -> bool:
    """Return whether a line may explain a difference of this program."""
    for words, causes in _EXCUSES.items():
        if words in line:
            return any(program.choices.get(axis) in options for axis, options in causes.items())
    return True


def largest_difference(plain: Entries, other: Entries) -> float:
    """Return the largest difference of numbers, relative where they are large; infinite if something else differs."""
    if not differences(plain, other, 0.0):
        return 0.0
    low, high = 1e-16, 1e3
    if differences(plain, other, high):
        return math.inf
    while high / low > 2:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if differences(plain, other, middle) else (low, middle)
    return high


def run_plain(program: Program, nudge: float = 0.0) -> Run:
    """Run a program in this process, as a notebook without workers does.

    With ``nudge``, each step of an optimizer begins with a relative change of the weights.
    """
    stdout = io.StringIO()
    namespace = {"__name__": "__main__"}
    dtype, state = torch.get_default_dtype(), torch.get_rng_state()
    output = Output()
    values: Entries = {}
    generator = torch.Generator().manual_seed(0)

    def change(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for value in group["params"]:
                noise = torch.randn(value.shape, generator=generator, dtype=value.dtype)
                value.data.mul_(1 + nudge * noise)

    handle = register_optimizer_step_pre_hook(change) if nudge else None
    with contextlib.redirect_stdout(stdout), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        try:
            exec(compile(program.source, f"<program {program.number}>", "exec"), namespace)
            values = {**collect_values(program.compare, namespace), **printed_values(stdout.getvalue())}
        except Exception as error:  # the program is wrong, which the verdict says
            output.error = type(error).__name__, str(error)
            output.traceback = traceback.format_exc()
        finally:
            if handle is not None:
                handle.remove()
            torch.set_default_dtype(dtype)
            torch.set_rng_state(state)
    output.stdout = stdout.getvalue()
    output.stderr = "".join(
        warnings.formatwarning(found.message, found.category, found.filename, found.lineno) for found in caught
    )
    return Run(values, {}, [output])


def printed_values(text: str) -> Entries:
    """Return what was printed as entries: the numbers, and the text around them."""
    return {
        "printed text": _NUMBER.sub("#", text),
        "printed": [float(number) for number in _NUMBER.findall(text)],
    }


def _numbers(entries: Entries) -> list[float]:
    found: list[float] = []
    for entry in entries.values():
        found += entry if isinstance(entry, list) else [entry] if isinstance(entry, float) else []
    return found
