"""``accel-nb checkpoint|config|demo|doctor|estimate|export|launch|runs|test``.

Exit status: 0 done, 1 it failed, 2 bad input (one line a problem); that of ``launch`` is the job's.
"""

import sys
from collections.abc import Callable, Sequence

from accel_nb.cli import checkpoint, configure, demo, estimate, export, launch, runs, selftest
from accel_nb.config.layers import did_you_mean
from accel_nb.errors import CheckpointError, ConfigError, MisuseError
from accel_nb.notebook.doctor import report

HELP = """\
accel-nb checkpoint inspect|verify|merge|reshard PATH   look into checkpoints and convert them
accel-nb config show [flags]   every option, its value and where it came from
accel-nb config init           begin a file of options for this machine (--out FILE)
accel-nb config import FILE    read what `accelerate config` wrote, value by value (--out FILE)
accel-nb config schema         the JSON Schema of the options
accel-nb config docs           the option reference as Markdown
accel-nb config flags          every flag in one table
accel-nb demo                  run the quickstart notebook into out/demo (--notebook PATH, --out DIR)
accel-nb doctor                what was found on this machine, and what will bite
accel-nb estimate MODEL        what training takes on each device, and which strategy fits (--help lists its flags)
accel-nb export NB.ipynb FILE.py   make a script of a notebook, with its options beside it
accel-nb launch TARGET [ARGS]  run a script, -m MODULE or a notebook as a job (--help lists its flags)
accel-nb runs list|show|compare|open   what was run here, and how it ended
accel-nb test                  check training on this machine's own devices (--gpus N, --cpus N, --timeout S, --json)"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("--help", "-h", "help"):
        print(HELP)
        return 0
    try:
        command, arguments = _command(words)
        print(command(arguments), end="")
    except (ConfigError, CheckpointError, MisuseError) as error:
        print(error, file=sys.stderr)
        return 2
    except demo.DemoFailed as error:
        print(error, file=sys.stderr)
        return 1
    except launch.JobFailed as failure:
        return failure.code
    except (estimate.NothingFits, selftest.SelfTestFailed) as error:
        print(error)
        return 1
    return 0


def _command(words: Sequence[str]) -> tuple[Callable[[Sequence[str]], str], Sequence[str]]:
    """Return what to run and its arguments."""
    group = words[0]
    if group not in _COMMANDS:
        near = did_you_mean(group, list(_COMMANDS))
        raise ConfigError(f"{group!a} is no command{near}; accel-nb --help lists them")
    return _COMMANDS[group], words[1:]


def _doctor(words: Sequence[str]) -> str:
    if words:
        raise ConfigError(f"{' '.join(words)!a}: the command takes no arguments; remove them")
    return report()


_COMMANDS: dict[str, Callable[[Sequence[str]], str]] = {
    "checkpoint": checkpoint.run,
    "config": configure.run,
    "demo": demo.run,
    "doctor": _doctor,
    "estimate": estimate.run,
    "export": export.run,
    "launch": launch.run,
    "runs": runs.run,
    "test": selftest.run,
}
