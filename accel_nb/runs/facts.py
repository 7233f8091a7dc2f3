"""The environment of a run: versions, machine and the state of the code. Fast to import; uses no network."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

GIT_TIMEOUT_S = 2.0
_PACKAGES = ("accel_nb", "torch", "numpy")


def environment_facts() -> dict[str, Any]:
    """Return versions of Python, system and packages, the machine's name and the working folder, if it exists."""
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "machine": platform.node(),
        "folder": _folder(),
        "executable": sys.executable,
        "packages": {name: found for name in _PACKAGES if (found := _version(name)) is not None},
    }


def git_facts(timeout_s: float = GIT_TIMEOUT_S) -> Mapping[str, Any] | None:
    """Return commit, branch and number of changed tracked files.

    Return None outside of a repository, without git, and if git fails or takes longer than ``timeout_s``.
    """
    command = ["git", "--no-optional-locks", "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode:
        return None
    heads = [line.split(" ", 2)[1:] for line in done.stdout.splitlines() if line.startswith("# branch.")]
    facts = dict(heads)
    changed = [line for line in done.stdout.splitlines() if line and not line.startswith("#")]
    return {"commit": facts.get("branch.oid"), "branch": facts.get("branch.head"), "num_changed": len(changed)}


def _folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # it was deleted
        return ""


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
