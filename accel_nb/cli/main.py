"""``accel-nb checkpoint|completion|config|demo|doctor|estimate|export|launch|merge-weights|runs|test``.

Exit status: 0 for success, 1 for failure, 2 for wrong input (one line for each problem); ``launch`` returns the job's.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module, metadata
from types import MappingProxyType

from accel_nb.cli.colors import colorize
from accel_nb.cli.command_failed import CommandFailed
from accel_nb.errors import CheckpointError, ConfigError, MisuseError
from accel_nb.runtime.process.secrets import redact

HELP = """\
accel-nb checkpoint inspect|verify|merge|reshard PATH   inspect, verify and convert checkpoints
accel-nb completion bash|zsh|fish   a script that completes commands in the shell
accel-nb config show [flags]   every option, its value and its origin (--json)
accel-nb config init           create a file of options for this machine (--out FILE)
accel-nb config import FILE    convert a file of `accelerate config` or DeepSpeed to options (--out FILE, --json)
accel-nb config deepspeed [flags]   DeepSpeed's configuration, and which option sets each value (--out FILE)
accel-nb config schema         the JSON Schema of the options
accel-nb config docs           the option reference as Markdown
accel-nb config flags          every flag in one table
accel-nb demo                  run the quickstart notebook into out/demo (--notebook PATH, --out DIR)
accel-nb doctor                this machine's devices, and problems with their remedies (--json)
accel-nb estimate MODEL        the memory that training needs, and which strategy fits (--help lists its flags)
accel-nb export NB.ipynb FILE.py   convert a notebook to a script and a file of its options
accel-nb launch TARGET [ARGS]  run a script, -m MODULE or a notebook as a job (--help lists its flags)
accel-nb merge-weights SHARDS OUT   merge the shards that FSDP has saved into model.safetensors
accel-nb runs list|show|compare|label|open   the runs recorded on this machine, and how they ended
accel-nb test                  check training on this machine's devices (--gpus N, --cpus N, --timeout S, --json)
accel-nb --version             the version of this package"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("--help", "-h", "help"):
        print(HELP)
        return 0
    if words in (["--version"], ["-V"]):
        print(f"accel_nb {metadata.version('accel_nb')}")
        return 0
    try:
        command, arguments = _command(words)
        print(colorize(redact(command(arguments)), sys.stdout), end="")
    except (ConfigError, CheckpointError, MisuseError) as error:
        print(redact(str(error)), file=sys.stderr)
        return 2
    except CommandFailed as failure:
        if str(failure):
            stream = sys.stderr if failure.is_error_output else sys.stdout
            print(colorize(str(failure), stream), file=stream)
        return failure.code
    return 0


def _command(words: Sequence[str]) -> tuple[Callable[[Sequence[str]], str], Sequence[str]]:
    """Return the function of a command and its arguments."""
    name = words[0]
    if name not in COMMANDS:
        from accel_nb.config.message_text import did_you_mean

        other = _ACCELERATE_COMMANDS.get(name)
        suggestion = did_you_mean(name, list(COMMANDS)) if other is None else f"; instead of accelerate's, use {other}"
        raise ConfigError(f"{name!a} is not a command{suggestion}; accel-nb --help lists all commands")
    return import_module(f"accel_nb.cli.{COMMANDS[name]}").run, words[1:]


COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "checkpoint": "checkpoint",
        "completion": "completion",
        "config": "configure",
        "demo": "demo",
        "doctor": "doctor",
        "estimate": "estimate",
        "export": "export",
        "launch": "launch",
        "merge-weights": "merge_weights",
        "runs": "runs",
        "test": "selftest",
    }
)
"""The module of each command, imported only when the command is run, so that ``--help`` is fast."""

_ACCELERATE_COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "env": "doctor",
        "estimate-memory": "estimate MODEL",
        "to-fsdp2": "config import FILE",
        "tpu-config": "launch --tpus all on the TPU's machine",
    }
)
"""Commands of `accelerate` that have a different name here, and their replacements."""
