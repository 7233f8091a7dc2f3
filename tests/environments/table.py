"""Writes what the runs of `.ci/environments.py` left in ``results``: the table of versions, and the tested versions.

Run as ``python -m tests.environments.table [--check]``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from accel_nb.config.export import run_command

COMMAND = "python -m tests.environments.table"
RESULTS = Path(__file__).with_name("results")
TITLES = {
    "colab": "Google Colab",
    "kaggle": "Kaggle",
    "oldest": "lowest versions",
    "newest": "newest versions",
    "laptop": "`pip install`, empty venv",
}
HEAD = """# Environments

What `make test-environments` ran last, one venv for each column. Colab and Kaggle are replicas by their lists of
packages, on CPUs: neither their front ends nor their GPUs are part of it. A use that is named below is a test in
`tests/environments`.

"""


def read_results() -> dict[str, Any]:
    """Return the result of each environment, by name."""
    return {name: json.loads(file.read_text()) for name in TITLES if (file := RESULTS / f"{name}.json").exists()}


def generated_files() -> dict[str, str]:
    """Return the text of each generated file, by path."""
    results = read_results()
    tested = {
        package: sorted({result["versions"][package] for result in results.values()}, key=_sort_key)
        for package in next(iter(results.values()))["versions"]
    }
    return {
        "docs/environments.md": HEAD + _table(results),
        "accel_nb/runtime/process/tested_versions.json": json.dumps(tested, indent=2) + "\n",
    }


def _table(results: dict[str, Any]) -> str:
    runs = list(results.values())
    uses = dict.fromkeys(use for run in runs for use in run["results"])
    folders = dict.fromkeys(folder for run in runs for folder in run["counts"])
    rows = [
        ["", *(TITLES[name] for name in results)],
        ["---"] * (len(results) + 1),
        ["date", *(run["date"] for run in runs)],
        ["Python", *(run["python"] for run in runs)],
        *([package, *(run["versions"][package] for run in runs)] for package in runs[0]["versions"]),
        ["packages that an installation replaces", *(_number(run["replaced"]) for run in runs)],
        *([f"seconds of `{line}`", *(str(run["load_s"][line]) for run in runs)] for line in runs[0]["load_s"]),
        *([use.replace("_", " "), *(run["results"].get(use, "not run") for run in runs)] for use in uses),
        *([f"`{folder}`", *(_count(run["counts"].get(folder)) for run in runs)] for folder in folders),
    ]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _number(packages: list[str] | None) -> str:
    return "not asked" if packages is None else str(len(packages))


def _count(count: dict[str, int] | None) -> str:
    return "not run" if count is None else ", ".join(f"{number} {outcome}" for outcome, number in count.items())


def _sort_key(version: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in version.split(".")]


if __name__ == "__main__":
    sys.exit(run_command(sys.argv[1:], COMMAND, generated_files()))
