"""Batch files for Slurm: a Python program, without a shell, that starts one launcher on each machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from accel_nb.errors import ConfigError

SUBMIT_TIMEOUT_S = 120.0
WARN_S = 120
"""How long before its time limit a job is sent the signal to save and stop, in seconds."""
_MARK = "# Written by accel-nb launch --slurm; it is written anew by the next launch of the same name."


@dataclass(frozen=True, slots=True)
class BatchFile:
    """A batch file: its path and its text."""

    path: Path
    text: str

    def write(self) -> None:
        """Write the file; raise ConfigError if one exists that this tool has not written."""
        try:
            if self.path.exists() and _MARK not in self.path.read_text(encoding="utf-8", errors="replace"):
                raise ConfigError(
                    f"{self.path}: exists, and accel-nb launch has not written it; rename it, or give --name RUN"
                )
            self.path.write_text(self.text, encoding="utf-8")
            self.path.chmod(0o700)
        except OSError as error:
            raise ConfigError(
                f"{self.path}: cannot be written ({error.strerror}); launch from another folder"
            ) from None

    def submit(self) -> str:
        """Submit the file and return the job's number; raise ConfigError with the message of Slurm."""
        try:
            done = subprocess.run(
                ["sbatch", "--parsable", str(self.path)],
                capture_output=True, text=True, timeout=SUBMIT_TIMEOUT_S, check=False, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        except FileNotFoundError:
            raise ConfigError(
                f"there is no sbatch on this machine; {self.path} can be submitted on a machine with Slurm"
            ) from None
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ConfigError(f"sbatch does not answer ({error}); {self.path} can be submitted later") from None
        if done.returncode:
            reason = done.stderr.strip().partition("\n")[0]
            raise ConfigError(f"sbatch has refused {self.path}: {reason}; correct it with --sbatch NAME=VALUE")
        return done.stdout.strip().partition(";")[0]


def make_batch(
    name: str,
    words: Sequence[str],
    *,
    nnodes: int,
    gpus: int | str | None,
    cpus: int | None,
    options: Sequence[tuple[str, str]] = (),
) -> BatchFile:
    """Return the batch file of a launch; ``words`` are those of the launch on each machine.

    ``options`` are those of sbatch, by their long names. A job of one machine runs under ``srun`` too, which forwards
    signals.
    """
    settings = {
        "job-name": name,
        "nodes": str(nnodes),
        "ntasks-per-node": "1",
        "output": "%x-%j.log",
        "signal": f"B:TERM@{WARN_S}",
    }
    if isinstance(gpus, int):
        settings["gpus-per-node"] = str(gpus)
    if cpus is not None:
        settings["cpus-per-task"] = str(cpus)
    settings |= dict(options)
    python = sys.executable
    head = python if re.fullmatch(r"[\x21-\x7e]{1,120}", python) else "/usr/bin/env python3"
    srun = ["srun", "--kill-on-bad-exit=1", python, "-m", "accel_nb.cli", "launch", *words]
    text = "\n".join(
        [
            f"#!{head}",
            *(f"#SBATCH --{key}={_quoted(value)}" for key, value in settings.items()),
            _MARK,
            "import os",
            "",
            "command = [",
            *(f"    {word!r}," for word in srun),
            "]",
            "os.execvp(command[0], command)  # srun forwards the signal before the time limit",
            "",
        ]
    )
    return BatchFile(Path(os.getcwd()) / f"{_file_name(name)}.sbatch", text)


def _quoted(value: str) -> str:
    return f'"{value}"' if re.search(r"[\s#]", value) else value


def _file_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", name).strip(".") or "job"
