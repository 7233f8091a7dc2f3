"""One case: a notebook in a text file, with what is expected of it on workers.

A case file is in the percent format: ``# %%`` begins a cell. ``# %% accelerate [FLAGS]`` begins a cell that runs on
workers; the plain run takes it as any other cell. The lines before the first cell are the header::

    # Which shape this is, in a few words.
    # outcome: equal                       or: told WORDS, refused WORDS
    # outcome on 3: told WORDS              optional: another one on so many workers
    # compare: model, history              expressions whose values are compared after the last cell
    # share: running                       optional: values that are rank 0's share, which the receipt says
    # needs: sklearn                       optional: packages that the case imports
    # runs: always                         optional: the case runs in each test run

WORDS must be in a line that accel_nb itself puts out: a warning, a part of the receipt, a line below the cell, or an
error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Literal, get_args

FOLDER = Path(__file__).parent / "cases"
Outcome = Literal["equal", "told", "refused"]
Kind = Literal["equal", "told", "refused", "failed", "silent"]
"""The classes of what becomes of a case; the last two must be empty."""
_CELL = re.compile(r"^# %%(?P<rest>.*)$", re.MULTILINE)
_FIELD = re.compile(r"# (?P<name>outcome(?: on \d+)?|compare|share|needs|runs): (?P<value>.+)")


@dataclass(frozen=True)
class Cell:
    """One cell; ``flags`` is None where it runs in the kernel in both runs."""

    source: str
    flags: str | None = None


@dataclass(frozen=True)
class Case:
    """A notebook and what is expected of it."""

    name: str
    outcome: Outcome
    words: str
    compare: tuple[str, ...]
    cells: tuple[Cell, ...]
    share: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    is_fast: bool = False
    exceptions: Mapping[int, tuple[Outcome, str]] = field(default_factory=dict)
    """Outcomes that differ, by the number of workers."""

    def on(self, workers: int) -> Case:
        """Return the case with the outcome that is declared for so many workers."""
        outcome, words = self.exceptions.get(workers, (self.outcome, self.words))
        return replace(self, outcome=outcome, words=words)

    @property
    def group(self) -> str:
        """The folder that the case is in."""
        return self.name.partition("/")[0]


def read_case(name: str, text: str) -> Case:
    """Parse a case file; a mistake in it is a ValueError that names the file."""
    header, *rest = _CELL.split(text)
    found = {match["name"]: match["value"].strip() for match in map(_FIELD.fullmatch, header.splitlines()) if match}
    if missing := {"outcome", "compare"} - found.keys():
        raise ValueError(f"{name}: the header lacks {' and '.join(sorted(missing))}")
    outcome, words = _read_outcome(name, found["outcome"])
    if found.get("runs", "always") != "always":
        raise ValueError(f"{name}: runs is always or left out, not {found['runs']!r}")
    cells = tuple(_read_cell(name, mark.strip(), source) for mark, source in zip(rest[::2], rest[1::2], strict=True))
    if any("--cpus" in (cell.flags or "") for cell in cells):
        raise ValueError(f"{name}: the number of workers is the test's, so no cell has --cpus")
    if all(cell.flags is None for cell in cells):
        raise ValueError(f"{name}: no cell begins with '# %% accelerate'")
    return Case(
        name=name,
        outcome=outcome,
        words=words,
        compare=_listed(found["compare"]),
        cells=cells,
        share=_listed(found.get("share", "")),
        needs=_listed(found.get("needs", "")),
        is_fast="runs" in found,
        exceptions={
            int(key.removeprefix("outcome on ")): _read_outcome(name, value)
            for key, value in found.items()
            if key.startswith("outcome on ")
        },
    )


def _read_outcome(name: str, text: str) -> tuple[Outcome, str]:
    outcome, _, words = text.partition(" ")
    if outcome not in get_args(Outcome):
        raise ValueError(f"{name}: the outcome {outcome!r} is none of {', '.join(get_args(Outcome))}")
    if (outcome == "equal") == bool(words):
        raise ValueError(f"{name}: told and refused need the words that must appear, equal needs none")
    return outcome, words  # type: ignore[return-value]


@cache
def read_cases() -> Sequence[Case]:
    """Return every case, those of a group behind one another."""
    paths = sorted(FOLDER.glob("*/*.py"))
    return [read_case(path.relative_to(FOLDER).with_suffix("").as_posix(), path.read_text()) for path in paths]


def _read_cell(name: str, mark: str, source: str) -> Cell:
    word, _, flags = mark.partition(" ")
    if word not in ("", "accelerate"):
        raise ValueError(f"{name}: a cell begins with '# %%' or '# %% accelerate [FLAGS]', not '# %% {mark}'")
    return Cell(source.strip("\n") + "\n", flags.strip() if word else None)


def _listed(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())
