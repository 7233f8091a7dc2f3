"""accelerate's functions that launch a script from another program, as TRL's command line does."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from accel_nb.errors import ConfigError
from accel_nb.launch.job import LaunchJob
from accel_nb.launch.rank_task import PROGRAM
from accel_nb.launch.request import read_request, split_words


class LaunchParser(argparse.ArgumentParser):
    """Parses the words of a launch: the flags of ``accel-nb launch``, then a script or ``-m`` and a module."""

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return a namespace with ``flags``, ``module``, ``training_script``, ``training_script_args`` and ``func``."""
        words = list(sys.argv[1:] if args is None else args)
        target, problems = split_words(words)
        is_module = target[:1] == ["-m"]
        script = target[1:2] if is_module else target[:1]
        if not script and not problems:
            problems = ["name a script, or -m and a module"]
        if problems:
            self.error("\n".join(problems))
        found = argparse.Namespace() if namespace is None else namespace
        found.flags = words[: len(words) - len(target)]
        found.module, found.training_script = is_module, script[0]
        found.training_script_args = target[1 + is_module :]
        found.func = launch_command
        return found, []


def launch_command_parser(subparsers: Any = None) -> LaunchParser:
    """Return the parser of `launch_command`; with ``subparsers``, also add it to them as the command ``launch``."""
    parser = LaunchParser(prog="accel-nb launch", description="Train a script on several processes.")
    if subparsers is not None:
        subparsers.choices["launch"] = parser
    return parser


def launch_command(args: argparse.Namespace) -> None:
    """Run a parsed job to its end. Raise SystemExit with its exit code if it fails."""
    target = ["-m", args.training_script] if args.module else [args.training_script]
    words = [*args.flags, "-m", PROGRAM, *target, *args.training_script_args]
    try:
        job = LaunchJob.from_request(read_request(words))
        if job.resolved.config.dry_run:
            print(job.plan())
            return
        for note in job.notes:
            print(f"note: {note}", file=sys.stderr)
        ending = job.run()
    except ConfigError as error:
        sys.exit("\n".join(error.problems))
    if ending.code:
        sys.exit(ending.code)


def main() -> None:
    """Run the words of this process's command, as the command ``accelerate-launch`` does."""
    launch_command(launch_command_parser().parse_args())
