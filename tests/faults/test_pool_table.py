"""The table of faults names tests that exist, and says which faults have none."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLE = (ROOT / "docs" / "faults.md").read_text()
WITHOUT_TEST = {"F16", "F17"}


def test_every_row_names_tests_that_exist():
    rows = [line for line in TABLE.splitlines() if re.match(r"\| [A-Z]\d+ ", line)]
    for row in rows:
        tests = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", row)
        assert tests, f"a row without a test: {row}"
        for file, name in tests:
            assert f"def {name}(" in (ROOT / file).read_text(), f"{file} has no {name}"


def test_every_fault_is_in_the_table():
    named = set(re.findall(r"^\| ([A-Z]\d+) ", TABLE, re.MULTILINE))
    assert named | WITHOUT_TEST == {*(f"F{number}" for number in range(1, 26)), "C1", "C2"}
    assert all(f"{fault} (" in TABLE for fault in WITHOUT_TEST)
