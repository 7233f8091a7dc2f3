"""The table at the end of a test run: how many cases of the corpus were equal, told, refused, failed or silent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, get_args

from tests.realworld.case import Kind


def summary_lines(reports: Iterable[Any]) -> list[str]:
    """Return a line for each class, with the cases of the classes that must be empty; nothing if no case ran."""
    kinds: Counter[str] = Counter()
    bad: dict[str, list[str]] = {"failed": [], "silent": []}
    for report in reports:
        kind = dict(getattr(report, "user_properties", ())).get("realworld")
        if kind is not None and report.when == "call":
            kinds[kind] += 1
            bad.get(kind, []).append(report.nodeid.partition("[")[2].rstrip("]"))
    if not kinds:
        return []
    return [
        f"{kind:8} {kinds[kind]:4}{'' if not bad.get(kind) else '  must be 0: ' + ', '.join(bad[kind])}"
        for kind in get_args(Kind)
    ]
