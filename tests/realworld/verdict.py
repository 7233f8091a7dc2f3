"""What became of a case on workers: equal, told, refused, failed or silent."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from accel_nb.errors import AccelNbError
from tests.realworld.case import Case, Kind
from tests.realworld.values import TOLERANCE, Entries, differences
from tests.support.kernel import Output

OF_SHARE = "a printed loss or count is rank 0's share"

# Lines that say nothing of a difference: what runs, what was prepared, what is slower than it could be, and which rank
# the others wait for, which on a busy machine is said of a rank that goes on later.
_FACTS = re.compile(
    r"\d+ workers? on |nothing to prepare$|prepared |precision |(ddp|single|fsdp|deepspeed)$|zero_stage \d$"
    r"|accumulate \d+$|rank \d+ printed \d+ lines?: "
    rf"|{re.escape(OF_SHARE)}"
    r"|units \d+$|no DataLoader is prepared: every worker trains on the same batches"
    r"|.*the result is that of one device, but no faster"
    r"|rank [\d, ]+ waits? in .* for rank \d+, which is "
)
_WARNING = re.compile(r"^(?:.*:\d+: )?\w*Warning: (?P<words>.*)$", re.MULTILINE)
_ADDRESS = re.compile(r"0x[0-9a-f]+")
_OURS = re.compile(r"\b(workers?|ranks?|one device)\b|`--")
_STAND_IN = re.compile(r"(\w+\.)+\w+: ")
_OF_DIVISION = re.compile(r"share of the batch|batch (is|was) divided|weights are divided among the workers: ")


@dataclass
class Run:
    """One run of a case: what it left, what was put out, and the error that ended it."""

    values: Entries = field(default_factory=dict)
    shares: Entries = field(default_factory=dict)
    outputs: list[Output] = field(default_factory=list)

    @property
    def failed(self) -> Output | None:
        """The output of the cell that raised, or None."""
        return next((output for output in self.outputs if output.error is not None), None)


@dataclass(frozen=True)
class Verdict:
    """The class of a run, why, and what accel_nb said of it."""

    kind: Kind
    reasons: tuple[str, ...] = ()
    said: tuple[str, ...] = ()


def judge(case: Case, plain: Run, other: Run, tolerance: float = TOLERANCE) -> Verdict:
    """Say what became of a case whose plain run ended without an error."""
    put_out = lines_of_ours(plain, other)
    said = remarks(put_out)
    if (failed := other.failed) is not None and failed.error is not None:
        kind: Kind = "refused" if is_refusal(failed) else "failed"
        return Verdict(kind, (": ".join(failed.error), *failed.traceback.splitlines()[-25:]), said)
    reasons = differences(plain.values, other.values, tolerance)
    if OF_SHARE not in put_out:
        reasons += differences(plain.shares, other.shares, tolerance)
    if said:
        return Verdict("told", tuple(reasons), said)
    return Verdict("silent" if reasons else "equal", tuple(reasons))


def complaint(case: Case, verdict: Verdict, is_declared: bool = True) -> str | None:
    """Return why a verdict is not the declared outcome (or, where none is declared, is a bad one), or None."""
    wanted = f"{case.outcome} {case.words}".strip()
    where = "\n  ".join([*verdict.reasons, *(f"said: {line}" for line in verdict.said)])
    if not is_declared:
        return f"{case.name} is {verdict.kind}:\n  {where}" if verdict.kind in ("failed", "silent") else None
    if verdict.kind != case.outcome:
        return f"{case.name} is {verdict.kind}, declared {wanted}:\n  {where}"
    text = " ".join(verdict.reasons if case.outcome == "refused" else verdict.said)
    if case.words.lower() not in " ".join(text.split()).lower():
        return f"{case.name} is {verdict.kind}, but nothing says {case.words!r}:\n  {where}"
    return None


def lines_of_ours(plain: Run, other: Run) -> Sequence[str]:
    """Return the lines that accel_nb put out: those of the receipt and below the cells, and its warnings."""
    known = {line for output in plain.outputs for line in _lines(output, output.texts)}
    # The value of a last expression is the user's own, and may differ in its last digit.
    texts = [(output, [text for text in output.texts if text != output.result]) for output in other.outputs]
    found = dict.fromkeys(line for output, own in texts for line in _lines(output, own))
    return [line for line in found if line not in known]


def remarks(lines: Sequence[str]) -> tuple[str, ...]:
    """Return the lines that say more than what runs and what was prepared."""
    return tuple(line for line in lines if not _FACTS.match(line))


def is_refusal(output: Output) -> bool:
    """Whether the error that ended a cell is one of accel_nb's, or comes with its line on the divided batch or weights.

    A PoolError also stands in for an error of a type that the kernel cannot rebuild; it then begins with that type.
    """
    assert output.error is not None
    name, message = output.error
    is_ours = name in _names_of_errors(AccelNbError) and not _STAND_IN.match(message)
    return is_ours or _OF_DIVISION.search(output.traceback) is not None


def _lines(output: Output, texts: Sequence[str]) -> Iterator[str]:
    for text in texts:
        yield from (part.strip() for part in _ADDRESS.sub("0x", text).split(" · "))
    for match in _WARNING.finditer(output.stderr):
        if _OURS.search(match["words"]):
            yield match["words"].strip()


def _names_of_errors(root: type[AccelNbError]) -> set[str]:
    return {root.__name__}.union(*(_names_of_errors(kind) for kind in root.__subclasses__()))
