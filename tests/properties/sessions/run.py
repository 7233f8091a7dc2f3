"""Run random sessions from the command line: ``python -m tests.properties.sessions.run --cases 0-50 --shrink``."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from tests.properties.run import read_numbers
from tests.properties.sessions.notebooks import Finding, Notebooks, running_notebooks
from tests.properties.sessions.session import SessionCell, make_session

SHRINK_S = 120


def main(words: Sequence[str]) -> int:
    """Run the sessions and print what became of them; return 1 if one ends badly."""
    parser = argparse.ArgumentParser(prog="python -m tests.properties.sessions.run", description=__doc__)
    parser.add_argument("--cases", default="0-20", metavar="FIRST-END")
    parser.add_argument("--shrink", action="store_true", help="remove statements as long as the outcome stays")
    parser.add_argument("--told", action="store_true", help="print told and refused cells too")
    parser.add_argument("--source", action="store_true", help="print the cells up to a difference")
    given = parser.parse_args(words)
    total: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    bad: list[int] = []
    started = time.monotonic()
    with running_notebooks() as notebooks:
        for number in read_numbers(given.cases):
            cells = make_session(number).cells
            try:
                findings = list(notebooks.judge(cells))
            except Exception as error:
                print(f"BROKEN {number}: {type(error).__name__}: {str(error)[-600:]}", flush=True)
                total["broken"] += 1
                continue
            for found in findings:
                total[f"cell {found.kind}"] += 1
                if found.kind == "equal":
                    lines.update(f"{line:.90}" for line in found.said)
            last = findings[-1] if findings else None
            print(f"{number}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
            if last is not None and (last.kind in ("silent", "failed") or (given.told and last.kind == "told")):
                bad.append(number)
                if given.shrink:
                    cells, last = shrink(notebooks, cells, last)
                print(describe(number, cells, last, with_source=given.shrink or given.source), flush=True)
            if given.told:
                for found in findings:
                    if found.kind == "refused":
                        print(describe(number, cells, found, with_source=False), flush=True)
    print(dict(total), f"bad: {bad}")
    print("said although all is equal:", *(f"  {count} {line}" for line, count in lines.most_common(25)), sep="\n")
    print(f"{time.monotonic() - started:.0f} s")
    return int(bool(bad))


def shrink(notebooks: Notebooks, cells: Sequence[SessionCell], last: Finding) -> tuple[Sequence[SessionCell], Finding]:
    """Remove cells and statements one after another as long as the outcome stays the same."""
    cells = list(cells[: last.place + 1])
    sign = _sign(last)
    deadline = time.monotonic() + SHRINK_S

    def tried(fewer: list[SessionCell]) -> Finding | None:
        if time.monotonic() > deadline:
            return None
        try:
            findings = list(notebooks.judge(fewer))
        except Exception:
            return None
        if findings and findings[-1].kind == last.kind and _sign(findings[-1]) & sign:
            return findings[-1]
        return None

    size = max(1, len(cells) // 2)
    while size:
        place = 0
        while place < len(cells):
            fewer = [*cells[:place], *cells[place + size :]]
            if (found := tried(fewer)) is not None:
                cells, last = fewer[: found.place + 1], found
            else:
                place += size
        size //= 2
    for place in range(len(cells) - 1, -1, -1):
        for index in range(len(cells[place].statements) - 1, -1, -1):
            statements = list(cells[place].statements)
            del statements[index]
            fewer = list(cells)
            fewer[place] = replace(cells[place], statements=tuple(statements), magic="")
            if (found := tried(fewer)) is not None:
                cells, last = fewer, found
    for place, cell in enumerate(cells):
        if cell.is_accelerated:
            fewer = list(cells)
            fewer[place] = replace(cell, is_accelerated=False)
            if (found := tried(fewer)) is not None:
                cells, last = fewer, found
    return cells, last


def _sign(found: Finding) -> set[str]:
    """Return what identifies a finding: what is before the colon of each reason."""
    return {reason.partition(":")[0].split(" (")[0] for reason in found.reasons}


def describe(number: int, cells: Sequence[SessionCell], found: Finding, *, with_source: bool) -> str:
    """Return a finding in a few lines."""
    lines = [f"{found.kind.upper()} {number} at cell {found.place}"]
    if with_source:
        for cell in cells[: found.place + 1]:
            if not cell.statements or cell.statements[0].startswith("import abc"):
                continue
            lines.append("    #### %%accelerate" if cell.is_accelerated else "    ####")
            lines += [f"    {line}" for line in cell.source.splitlines()]
    lines += [f"  -> {reason:.700}" for reason in found.reasons[:6]]
    lines += [f"  said: {line:.250}" for line in found.said[-6:]]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
