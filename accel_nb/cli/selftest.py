"""``accel-nb test``: check training on this machine's devices."""

from __future__ import annotations

from collections.abc import Sequence

from accel_nb.cli.command_failed import CommandFailed
from accel_nb.cli.parser import parse_with_options
from accel_nb.config import environment_layer, parse_flags, resolve
from accel_nb.errors import ConfigError
from accel_nb.pool.device_assignment import assign_devices
from accel_nb.runtime.process.environment import option_variables
from accel_nb.runtime.process.hardware import find_gpus
from accel_nb.selftest.run import DEADLINE_S, run_checks

NUM_CPU_WORKERS = 2
_FLAGS = ("cpus", "gpus", "timeout")


class SelfTestFailed(CommandFailed):
    """A check failed; the message is the whole report."""


def run(words: Sequence[str]) -> str:
    """Run the checks and return the report. Raise SelfTestFailed with the report if a check failed.

    Accepts ``--gpus``, ``--cpus`` and ``--timeout`` as a cell does, and ``--json``. The default is all visible GPUs, or
    two CPU workers without a GPU.
    """
    as_json, others = parse_with_options("accel-nb test", "Check training on this machine's devices.", words)
    flags = parse_flags(others, source="command line")
    others = [name for name in flags.values if name not in _FLAGS]
    if others:
        listed = ", ".join(f"--{name.replace('_', '-')}" for name in others)
        raise ConfigError(f"accel-nb test takes --cpus N, --gpus N, --timeout SECONDS and --json, and no {listed}")
    config = resolve([environment_layer(option_variables()), flags]).config
    cpus = config.cpus
    if cpus is None and config.gpus is None and not find_gpus():
        cpus = NUM_CPU_WORKERS
    report = run_checks(assign_devices(gpus=config.gpus, cpus=cpus), deadline_s=config.timeout or DEADLINE_S)
    text = report.as_json() if as_json else report.as_table()
    if not report.is_ok:
        raise SelfTestFailed(text.rstrip("\n"))
    return text
