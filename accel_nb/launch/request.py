"""Parsing of ``accel-nb launch [FLAGS] TARGET [ARGUMENTS]``. All of it is checked before anything starts or is written.

Flags before the target are those of the launch; words after it are passed to the target unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from accel_nb.config import OPTIONS, Layer, check_layer, parse_flags
from accel_nb.config.message_text import did_you_mean, quoted
from accel_nb.errors import ConfigError
from accel_nb.launch.accelerate_file import ImportedFile, read_accelerate_file
from accel_nb.launch.accelerate_flags import equivalent_of
from accel_nb.launch.rank_task import Target
from accel_nb.launch.target import check_target

SOURCE = "command line"
MAX_RESTARTS = 1000
BACKENDS = ("c10d", "static")
FORMATS = ("kubeflow",)

FLAGS = {
    "--nnodes": "N|MIN:MAX",
    "--node-rank": "N",
    "--rdzv-backend": "|".join(BACKENDS),
    "--rdzv-endpoint": "HOST:PORT",
    "--rdzv-id": "ID",
    "--max-restarts": "N",
    "--slurm": "",
    "--sbatch": "NAME=VALUE",
    "--emit": "|".join(FORMATS),
    "--image": "IMAGE",
    "--out": "FILE",
    "--config-file": "FILE",
}
"""The flags that determine where a job runs, with their values; the options of a run come from the schema."""

_SCHEMA_FLAGS = {f"--{option.flag}": not option.is_switch for option in OPTIONS.values()} | {
    f"--no-{option.flag}": False for option in OPTIONS.values() if option.is_switch
}
_ENDPOINT = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})")
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,511}")
_SBATCH = re.compile(r"([a-z][a-z0-9-]{0,63})=([^\x00-\x1f\x7f\"'\\]{1,512})")
_RESERVED_SBATCH = ("nodes", "ntasks", "ntasks-per-node", "wrap", "array", "chdir")


@dataclass(frozen=True, slots=True)
class Machines:
    """Several machines, each with a launcher that connects to an endpoint, as with ``torchrun``."""

    nnodes: str = "1"
    node_rank: int | None = None
    backend: str = "c10d"
    endpoint: str | None = None
    id: str = "none"

    @property
    def is_single_machine(self) -> bool:
        """Whether the job runs on this machine only."""
        return self.nnodes == "1"


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """A launch as requested on the command line."""

    target: Target
    flags: Layer
    notebook_layer: Layer | None = None
    """The options in a notebook's metadata."""
    imported: ImportedFile | None = None
    """The file of accelerate's that ``--config-file`` names."""
    machines: Machines = field(default_factory=Machines)
    max_restarts: int = 0
    is_for_slurm: bool = False
    sbatch: tuple[tuple[str, str], ...] = ()
    emit: str | None = None
    image: str | None = None
    out: str | None = None

    @property
    def layers(self) -> list[Layer]:
        """The layers of options of the request."""
        of_files = [] if self.imported is None else [self.imported.layer]
        return [*of_files, *([] if self.notebook_layer is None else [self.notebook_layer]), self.flags]


def read_request(words: Sequence[str]) -> LaunchRequest:
    """Return the request; raise ConfigError with all problems."""
    schema_words, own, rest, problems = _split(words)
    flags = parse_flags(schema_words, SOURCE)
    try:
        check_layer(flags)
    except ConfigError as error:
        problems += error.problems
    reader = _FlagReader(own, problems)
    imported = None
    if (path := reader.last("--config-file")) is not None:
        try:
            imported = read_accelerate_file(path)
        except ConfigError as error:
            problems += error.problems
        else:
            reader.add_defaults(imported.flags)
    machines = reader.machines()
    max_restarts = reader.count("--max-restarts", 0, MAX_RESTARTS) or 0
    sbatch = reader.sbatch()
    emit = reader.choice("--emit", FORMATS)
    image = reader.word("--image", _IMAGE)
    out = reader.last("--out")
    is_for_slurm = "--slurm" in own
    target, stored = None, None
    if not problems:
        try:
            target, stored = check_target(rest)
        except ConfigError as error:
            problems += error.problems
    if target is None:
        raise ConfigError(list(dict.fromkeys(problems)))
    request = LaunchRequest(
        target, flags, stored, imported, machines, max_restarts, is_for_slurm, sbatch, emit, image, out
    )
    if conflicts := _find_conflicts(request):
        raise ConfigError(list(dict.fromkeys(conflicts)))
    return request


def split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the target of a launch with its arguments, and the problems of the flags before it."""
    _, _, target, problems = _split(words)
    return target, problems


def _split(words: Sequence[str]) -> tuple[list[str], dict[str, list[str]], list[str], list[str]]:
    """Return the words for the schema, our own flags, the target with its arguments, and problems."""
    schema: list[str] = []
    own: dict[str, list[str]] = {}
    problems: list[str] = []
    index = 0
    while index < len(words):
        word = words[index]
        if word == "-m" or not word.startswith("-"):
            break
        name, has_value, value = word.partition("=")
        if (dashed := name.replace("_", "-")) in FLAGS or dashed in _SCHEMA_FLAGS:  # accelerate has both ways
            name = dashed
            word = name + has_value + value
        takes = bool(FLAGS[name]) if name in FLAGS else _SCHEMA_FLAGS.get(name)
        if takes is None:
            problems.append(f"{quoted(name)} is not a flag of accel-nb launch{_suggest(name)}")
            return [], {}, [], problems  # whether it takes a value, and so where the target starts, is unknown
        given = [value] if has_value else list(words[index + 1 : index + 2]) if takes else []
        if takes and (not given or (not has_value and given[0].startswith("--"))):
            problems.append(f"{name} needs a value: {name} {FLAGS.get(name) or _metavar(name)}")
            given = []
        if name in FLAGS:
            if has_value and not takes:
                problems.append(f"{quoted(word)}: the flag takes no value; write {name}")
            own.setdefault(name, []).extend(given)
        elif given or not takes:
            schema += [word] if has_value else [word, *given]
        index += 1 if has_value or not takes else 1 + len(given)
    return schema, own, list(words[index:]), problems


def _suggest(name: str) -> str:
    other = equivalent_of(name)
    if other is not None:
        return f", as it is of accelerate's: {other}"
    known = [*FLAGS, *_SCHEMA_FLAGS]
    return did_you_mean(name.lstrip("-"), {flag[2:]: flag for flag in known}) or "; accel-nb launch --help lists them"


def _metavar(name: str) -> str:
    return next(option.metavar for option in OPTIONS.values() if f"--{option.flag}" == name)


class _FlagReader:
    """Reads the values of the launcher's own flags, and collects problems."""

    def __init__(self, own: dict[str, list[str]], problems: list[str]) -> None:
        self._own = own
        self._problems = problems

    def add_defaults(self, flags: Mapping[str, list[str]]) -> None:
        """Add flags that a file sets, where the command line does not; it sets machines as a whole."""
        if "--nnodes" in self._own:
            return
        if self._is_submitted_later:  # a scheduler connects the machines
            flags = {name: values for name, values in flags.items() if name == "--nnodes"}
        self._own = {**flags, **self._own}

    @property
    def _is_submitted_later(self) -> bool:
        return "--slurm" in self._own or "--emit" in self._own

    def last(self, name: str) -> str | None:
        values = self._own.get(name, [])
        if len(set(values)) > 1:
            self._problems.append(f"{name} is given as {' and as '.join(map(quoted, values))}; remove one of the two")
        if values and (not values[-1] or not values[-1].isprintable()):
            self._problems.append(f"{name} {values[-1]!a} is not allowed; give {FLAGS[name]}")
            return None
        return values[-1] if values else None

    def word(self, name: str, pattern: re.Pattern[str], allowed: str | None = None) -> str | None:
        value = self.last(name)
        if value is not None and not pattern.fullmatch(value):
            self._problems.append(f"{name} {quoted(value)} is not allowed; give {allowed or FLAGS[name]}")
            return None
        return value

    def count(self, name: str, low: int, high: int) -> int | None:
        value = self.word(name, re.compile(r"[0-9]{1,9}"), f"a whole number from {low} to {high}")
        if value is not None and not low <= int(value) <= high:
            self._problems.append(f"{name} {value} is not allowed; give a whole number from {low} to {high}")
            return None
        return None if value is None else int(value)

    def choice(self, name: str, choices: Sequence[str]) -> str | None:
        value = self.last(name)
        if value is not None and value not in choices:
            self._problems.append(f"{name} {quoted(value)} is not allowed; give {' or '.join(choices)}")
            return None
        return value

    def machines(self) -> Machines:
        num_problems = len(self._problems)
        nnodes = self.word("--nnodes", re.compile(r"[1-9][0-9]{0,4}(:[1-9][0-9]{0,4})?"), "a number, or MIN:MAX")
        low, _, high = (nnodes or "1").partition(":")
        if high and int(high) < int(low):
            self._problems.append(f"--nnodes {nnodes} is not allowed; MIN:MAX goes upwards")
        node_rank = self.count("--node-rank", 0, 99_999)
        endpoint = self.word("--rdzv-endpoint", _ENDPOINT)
        if endpoint is not None and not 1 <= int(endpoint.rpartition(":")[2]) <= 65535:
            self._problems.append(f"--rdzv-endpoint {endpoint}: a port is from 1 to 65535")
        backend = self.choice("--rdzv-backend", BACKENDS)
        name = self.word("--rdzv-id", _WORD, "up to 128 letters, digits, dots, dashes and underscores")
        if node_rank is not None and node_rank >= int(high or low):
            self._problems.append(f"--node-rank {node_rank} is outside of --nnodes {nnodes or 1}; ranks start at 0")
        if backend == "static" and low != "1" and (node_rank is None or high):
            self._problems.append("--rdzv-backend static needs --node-rank, and a fixed number of --nnodes")
        if len(self._problems) == num_problems:
            self._check_rendezvous(is_single_machine=(high or low) == "1")
        return Machines(nnodes or "1", node_rank, backend or "c10d", endpoint, name or "none")

    def _check_rendezvous(self, *, is_single_machine: bool) -> None:
        """Record a problem for flags of a rendezvous that have no effect."""
        given = [
            name for name in ("--node-rank", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id") if name in self._own
        ]
        if is_single_machine and "--nnodes" in self._own and self._own.get("--node-rank") == ["0"]:
            given.remove("--node-rank")  # correct, and passed by scripts for any number of machines
        if not given:
            return
        if self._is_submitted_later:
            self._problems.append(f"a scheduler connects its machines itself; remove {' and '.join(given)}")
        elif is_single_machine:
            have = "has" if len(given) == 1 else "have"
            self._problems.append(f"{' and '.join(given)} {have} no effect on one machine; give --nnodes N too")

    def sbatch(self) -> tuple[tuple[str, str], ...]:
        pairs: list[tuple[str, str]] = []
        for value in self._own.get("--sbatch", []):
            found = _SBATCH.fullmatch(value)
            if found is None:
                self._problems.append(
                    f"--sbatch {quoted(value)} is not allowed; give a long option of sbatch, as in time=2:00:00"
                )
            elif found[1] in _RESERVED_SBATCH:
                self._problems.append(f"--sbatch {found[1]} is set by the launch (--nnodes, --gpus); remove it")
            elif dict(pairs).get(found[1], found[2]) != found[2]:
                self._problems.append(f"--sbatch {found[1]} is given with two values; remove one of the two")
            else:
                pairs.append((found[1], found[2]))
        return tuple(pairs)


def _find_conflicts(request: LaunchRequest) -> list[str]:
    """Return the problems of flags that do not go together."""
    target, machines, out = request.target, request.machines, request.out
    is_for_slurm, emit = request.is_for_slurm, request.emit
    problems: list[str] = []
    is_submitted_later = is_for_slurm or emit is not None
    if target.kind == "notebook" and not machines.is_single_machine:
        problems.append(
            f"{target.name} is a notebook, which runs on one machine; accel-nb export converts it to a script"
        )
    if ":" in machines.nnodes and is_submitted_later:
        problems.append(f"--nnodes {machines.nnodes}: a scheduler starts a fixed number of machines; give one number")
    if not machines.is_single_machine and machines.endpoint is None and not is_submitted_later:
        problems.append("--nnodes needs --rdzv-endpoint HOST:PORT, which all machines connect to: the first one's name")
    if is_for_slurm and emit:
        problems.append("--slurm and --emit: only one of the two can be given; remove one")
    if request.sbatch and not is_for_slurm:
        problems.append("--sbatch belongs to --slurm, which is not given")
    if request.image and not emit:
        problems.append("--image belongs to --emit, which is not given")
    if out is not None and target.kind != "notebook":
        problems.append(f"--out is the file for a notebook's executed copy, and {target.name} is a {target.kind}")
    elif out is not None:
        copy = Path(out)
        if not copy.parent.is_dir() or copy.is_dir():
            problems.append(f"--out {quoted(out)}: give the path of a file in an existing folder")
        elif copy.resolve() == Path(target.name).resolve():
            problems.append(f"--out {quoted(out)} is the notebook itself, which is not overwritten; give another file")
    return problems
