"""Run random programs from the command line.

``python -m tests.properties.run --cases 0-200 --workers 2 3`` prints each bad program and how many programs of each
choice were equal, told, refused, failed or silent. ``--each`` runs instead a program for each option, with no other
unusual choice. ``--with loss=ccc encoder=mlp`` replaces choices of every program. ``--shrink`` replaces the choices of
each bad program by simpler ones as long as it stays bad. ``--source`` prints the programs. With
``--flags=--no-prepare`` each worker trains alone, so that every program must be equal.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch

from tests.properties.program import Program, make_program, single_choices
from tests.properties.verdict import BAD, KINDS, Kind, Runner, Verdict
from tests.properties.workers import running_workers


def main(words: Sequence[str]) -> int:
    """Run the programs and print the summary; return 1 if there is a bad outcome."""
    parser = argparse.ArgumentParser(prog="python -m tests.properties.run", description="Run random programs.")
    parser.add_argument("--cases", default="0-100", metavar="FIRST-END", help="numbers, as 0-100 or 7 or 3,8,12")
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 3], metavar="N")
    parser.add_argument("--with", dest="forced", nargs="+", default=[], metavar="AXIS=OPTION")
    parser.add_argument("--flags", default="", help="more flags of the cells, as --flags='--strategy single'")
    parser.add_argument("--each", action="store_true", help="run one program for each option, instead of numbers")
    parser.add_argument("--shrink", action="store_true", help="find the simplest form of each bad program")
    parser.add_argument(
        "--source", action="store_true", help="print the source of every bad program, or of the only one"
    )
    parser.add_argument("--told", action="store_true", help="print programs that are told or refused, too")
    given = parser.parse_args(words)
    forced = dict(choice.split("=", 1) for choice in given.forced)
    programs = [make_program(number, forced) for number in read_numbers(given.cases)]
    if given.each:
        programs = list(single_choices())
    torch.set_num_threads(1)
    verdicts: list[Verdict] = []
    shown: tuple[Kind, ...] = (*BAD, "told", "refused") if given.told or len(programs) == 1 else BAD
    started = time.monotonic()
    with running_workers(given.flags) as workers:
        runner = Runner(workers)
        for size in given.workers:
            for program in programs:
                verdict = runner.judge(program, size)
                if given.shrink and verdict.kind in ("failed", "silent"):
                    verdict = shrink(runner, verdict, forced)
                verdicts.append(verdict)
                if verdict.kind in shown:
                    print(describe(verdict), flush=True)
                if given.source and (verdict.kind in BAD or len(programs) == 1):
                    print(numbered(verdict.program.source), flush=True)
    print(table_of_singles(verdicts) if given.each else summary(verdicts))
    print(f"{len(verdicts)} runs in {time.monotonic() - started:.0f} s")
    return int(any(verdict.kind in BAD for verdict in verdicts))


def read_numbers(text: str) -> list[int]:
    """Return the numbers of ``0-100`` (without the last), ``7`` or ``3,8,12``."""
    if "-" in text:
        first, end = text.split("-")
        return list(range(int(first), int(end)))
    return [int(part) for part in text.split(",")]


def shrink(runner: Runner, verdict: Verdict, forced: Mapping[str, str]) -> Verdict:
    """Replace choices by the simplest ones, one after another, as long as the outcome stays the same."""
    kept = dict(forced)
    for axis, option in verdict.program.unusual.items():
        if axis in forced:
            continue
        tried = make_program(verdict.program.number, {**kept, axis: verdict.program.options[axis][0]})
        found = runner.judge(tried, verdict.workers)
        if found.kind == verdict.kind and found.is_repeated:
            verdict, kept = found, {**kept, axis: tried.choices.get(axis, option)}
    return verdict


def table_of_singles(verdicts: Iterable[Verdict]) -> str:
    """Return a line for each unusual choice, with the outcome on each number of workers."""
    found: dict[str, list[str]] = defaultdict(list)
    for verdict in verdicts:
        said = f" ({verdict.said[0]:.70})" if verdict.kind == "told" else ""
        found[choices_text(verdict.program)].append(f"{verdict.kind} on {verdict.workers}{said}")
    return "\n".join(f"{choice:60} {', '.join(kinds)}" for choice, kinds in found.items())


def choices_text(program: Program) -> str:
    """Return the unusual choices of a program."""
    return ", ".join(f"{axis}={option}" for axis, option in program.unusual.items()) or "the simplest program"


def describe(verdict: Verdict) -> str:
    """Return the outcome of a program in a few lines."""
    alone = "" if verdict.is_repeated else " (only after other programs)"
    lines = [f"{verdict.kind} {verdict.program.number} on {verdict.workers}{alone}: {choices_text(verdict.program)}"]
    if verdict.kind in ("failed", "refused", "invalid"):
        lines += ["    " + line for line in "\n".join(verdict.reasons).splitlines()[-12:]]
    else:
        lines += [f"    {line:.200}" for line in verdict.reasons[:4]]
    lines += [f"    said: {line:.300}" for line in verdict.said]
    return "\n".join(lines)


def numbered(source: str) -> str:
    """Return a source with line numbers."""
    return "\n".join(f"{number:4} {line}" for number, line in enumerate(source.splitlines(), 1))


def summary(verdicts: Iterable[Verdict]) -> str:
    """Return the table of outcomes by choice, those with most bad outcomes first, and what was said."""
    by_choice: dict[str, Counter[str]] = defaultdict(Counter)
    said: dict[str, Counter[str]] = defaultdict(Counter)
    total: Counter[str] = Counter()
    for verdict in verdicts:
        total[verdict.kind] += 1
        for axis, option in verdict.program.choices.items():
            by_choice[f"{axis}={option}"][verdict.kind] += 1
        for line in verdict.said:
            said[f"{line:.110}"][verdict.kind] += 1
        if verdict.kind == "refused":
            said[f"{verdict.reasons[0]:.110}"]["refused"] += 1

    def badness(item: tuple[str, Counter[str]]) -> tuple[float, int]:
        bad = sum(item[1][kind] for kind in BAD)
        return -bad / sum(item[1].values()), -bad

    lines = ["", "choice".ljust(46) + "".join(f"{kind:>9}" for kind in KINDS)]
    for choice, counts in sorted(by_choice.items(), key=badness):
        lines.append(f"{choice:45.45} " + "".join(f"{counts[kind] or '':>9}" for kind in KINDS))
    lines.append("all".ljust(46) + "".join(f"{total[kind]:>9}" for kind in KINDS))
    lines += ["", "said, by the outcomes:"]
    lines += [f"  {dict(counts)}  {line}" for line, counts in sorted(said.items(), key=lambda i: -i[1].total())]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
