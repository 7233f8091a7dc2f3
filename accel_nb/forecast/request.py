"""Parsing of forecast requests from the words of a command line or magic. Imports no torch."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from accel_nb.config import Config, Layer, environment_layer, parse_flags, resolve
from accel_nb.config.byte_sizes import bytes_of, read_bytes, size_text
from accel_nb.config.conflicts import world_problems
from accel_nb.config.message_text import quoted
from accel_nb.errors import ConfigError
from accel_nb.forecast.meshes import MeshShape, simple_shapes
from accel_nb.forecast.plans import USABLE_FRACTION, RunSetting
from accel_nb.runtime.process.hardware import Machine

MAX_BATCH = 1_000_000_000
_OPTIONS = (
    "gpus",
    "cpus",
    "precision",
    "batch",
    "config",
    "fsdp.hybrid_shard_size",
    "mesh.tp",
    "mesh.cp",
    "mesh.pp",
    "mesh.ep",
)
_SPEC = re.compile(r"(?:(?P<name>[A-Za-z_]\w*)=)?(?P<dtype>[a-z]+\d+|bool)?(?P<colon>:)?(?P<shape>\d+(?:x\d+)*)?")
_DTYPES = ("float32", "float16", "bfloat16", "float64", "int64", "int32", "uint8", "bool")
_ITEMSIZES: Mapping[str, int] = MappingProxyType({"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8})


@dataclass(frozen=True, slots=True)
class InputSpec:
    """One tensor of a sample: its name in a named batch, its dtype as torch calls it, its shape without the batch."""

    name: str | None
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ForecastRequest:
    """A request for a forecast; ``flags`` are the options of a run that affect it."""

    target: str | None
    flags: Layer
    optimizer: str | None = None
    data: str | None = None
    loss: str | None = None
    batch_size: int | None = None
    inputs: tuple[InputSpec, ...] = ()
    label: InputSpec | None = None
    itemsize: int | None = None
    memory: int | None = None
    output_format: Literal["text", "markdown", "json"] = "text"

    def config(self, variables: Mapping[str, str]) -> Config:
        """Return the run's options; ``variables`` are those of the environment. Raises `ConfigError`."""
        return resolve([environment_layer(variables), self.flags]).config

    def other_devices(self, config: Config) -> list[str] | None:
        """Return the devices of another machine: GPUs whose memory is given; None for this machine's devices."""
        if self.memory is None or not isinstance(config.gpus, int):
            return None
        return [f"cuda:{index}" for index in range(config.gpus)]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise ConfigError(f"{self.prog}: {message}")


def read_request(words: Sequence[str], command: str, *, in_notebook: bool) -> ForecastRequest:
    """Return the request in the words; raises `ConfigError` with what is allowed.

    The target comes first. In a notebook the target, the data, the loss and the optimizer are names of variables;
    elsewhere the target is a path.
    """
    has_target = bool(words) and not words[0].startswith("-")
    options, rest = _parser(command, in_notebook).parse_known_args(list(words[has_target:]))
    if not has_target and not in_notebook:
        raise ConfigError(f"{command} needs a MODEL, before any flag; {command} --help lists what it may be")
    flags = parse_flags(rest, source=command)
    unused = [] if in_notebook else [name for name in flags.values if name not in _OPTIONS]
    if unused:
        raise ConfigError(
            f"{command} has no use for {_join_flags(unused)}; of a run's flags it accepts {_join_flags(_OPTIONS)}"
        )
    inputs: tuple[InputSpec, ...] = tuple(map(_parse_input, getattr(options, "input", None) or ()))
    sequence = getattr(options, "sequence", None)
    if sequence is not None:
        length = _parse_whole(sequence, "--sequence")
        inputs += (InputSpec("input_ids", "int64", (length,)), InputSpec("labels", "int64", (length,)))
    names = {sample.name for sample in inputs}
    if len(inputs) > 1 and (None in names or len(names) < len(inputs)):
        raise ConfigError(
            f"{command}: several inputs need a name each, as in --input ids=int64:128 --input mask=bool:128"
        )
    label = getattr(options, "target_input", None)
    return ForecastRequest(
        target=words[0] if has_target else None,
        flags=flags,
        optimizer=options.optimizer,
        data=getattr(options, "data", None),
        loss=getattr(options, "loss", None),
        batch_size=None if options.batch_size is None else _parse_whole(options.batch_size, "--batch-size"),
        inputs=inputs,
        label=None if label is None else _parse_input(label),
        itemsize=None if getattr(options, "dtype", None) is None else _ITEMSIZES[options.dtype],
        memory=None if options.memory is None else read_bytes(options.memory, "--memory", least=1),
        output_format="json" if options.json else "markdown" if options.markdown else "text",
    )


def _parser(command: str, in_notebook: bool) -> _Parser:
    parser = _Parser(prog=command, usage=f"{command} MODEL [flags]", allow_abbrev=False, add_help=not in_notebook)
    if in_notebook:
        parser.add_argument("--data", metavar="NAME", help="a loader or a batch by name")
        parser.add_argument("--loss", metavar="NAME", help="a function of output and batch by name")
    else:
        parser.description = (
            "Forecast the memory of a training on each device, for every way of dividing it. MODEL is "
            "package.module:name of a module or of a function that creates one, a *.safetensors file or a folder of "
            "them, or the config.json of a transformers model."
        )
        parser.epilog = f"Of a run's flags it accepts {_join_flags(_OPTIONS)}; accel-nb config flags explains them."
        parser.add_argument(
            "--input", action="append", metavar="[NAME=][DTYPE:]SHAPE", help="an input of one sample, as 3x224x224"
        )
        parser.add_argument(
            "--target", dest="target_input", metavar="[DTYPE:]SHAPE", help="the target of one sample, as int64"
        )
        parser.add_argument("--sequence", metavar="N", help="short for input_ids and labels of N tokens")
        parser.add_argument("--dtype", choices=list(_ITEMSIZES), help="dtype of the weights")
    parser.add_argument("--optimizer", metavar="NAME", help="default: adamw, or the notebook's own")
    parser.add_argument("--batch-size", metavar="N", help="how many samples the loader yields")
    parser.add_argument("--memory", metavar="SIZE", help="memory of one device, as 80GiB, to plan for another machine")
    output_format = parser.add_mutually_exclusive_group()
    output_format.add_argument("--json", action="store_true")
    output_format.add_argument("--markdown", action="store_true")
    return parser


def find_setting(
    devices: Sequence[str], machine: Machine, config: Config, *, batch_size: int = 0, memory: int | None = None
) -> RunSetting:
    """Return the setting of a run on these devices; ``memory``, or else the option, replaces the memory of one device.

    The precision ``auto`` counts as bf16. A batch is divided among the workers unless it is per worker.
    """
    world = len(devices)
    is_host = not devices[0].startswith("cuda")
    if memory is None and config.memory is not None:
        memory = bytes_of(config.memory)
    kind = ("CPU worker" if is_host else "GPU") + ("s" if world > 1 else "")
    if memory is not None:
        free, name = memory, f"{world} {kind} of {size_text(memory)}"
    elif is_host:
        free, name = machine.free_bytes // world, f"{world} {kind}"
    else:
        gpus = [machine.gpus[int(device.partition(":")[2] or 0)] for device in devices]
        smallest = min(gpus, key=lambda gpu: gpu.free_bytes)
        free, name = smallest.free_bytes, f"{world} x {smallest.name}"
    is_shared = config.batch != "per-worker"
    ranks_per_replica = config.fsdp.hybrid_shard_size
    if ranks_per_replica is not None and world % ranks_per_replica:
        raise ConfigError(f"fsdp.hybrid_shard_size is {ranks_per_replica}, which does not divide the {world} workers")
    mesh = MeshShape(config.mesh.pp, config.mesh.cp, config.mesh.tp, config.mesh.ep)
    for problem in world_problems(config, world).values() if mesh.degrees else ():
        raise ConfigError(f"mesh {mesh.describe()}: {problem}")
    return RunSetting(
        world=world,
        devices=name,
        device_bytes=int(free * USABLE_FRACTION),
        host_bytes=int(machine.free_bytes * USABLE_FRACTION),
        precision="bf16" if config.precision == "auto" else config.precision,
        batch_size=batch_size,
        samples_per_rank=-(-batch_size * mesh.size // world) if is_shared else batch_size,
        uses_host_memory=is_host,
        ranks_per_replica=ranks_per_replica,
        mesh=mesh,
        compared_meshes=simple_shapes(world) if mesh.size == 1 else (),
    )


def _parse_input(text: str) -> InputSpec:
    found = _SPEC.fullmatch(text)
    dtype = (found and found["dtype"]) or "float32"
    shape = found["shape"] if found else None
    has_both = found is not None and found["dtype"] is not None and shape is not None
    if found is None or dtype not in _DTYPES or bool(found["colon"]) != has_both or not (found["dtype"] or shape):
        raise ConfigError(
            f"{quoted(text)} is not an input; write [NAME=][DTYPE:]SHAPE without the batch, as 3x224x224 or "
            f"ids=int64:128; a DTYPE is one of {', '.join(_DTYPES)}"
        )
    sizes = tuple(_parse_whole(size, f"a size of {quoted(text)}") for size in shape.split("x")) if shape else ()
    return InputSpec(found["name"], dtype, sizes)


def _parse_whole(text: str, where: str) -> int:
    if not (text.isascii() and text.isdecimal()) or len(text) > 10 or not 1 <= int(text) <= MAX_BATCH:
        raise ConfigError(f"{where} is {quoted(text)}; give a whole number from 1 to {MAX_BATCH}")
    return int(text)


def _join_flags(names: Sequence[str]) -> str:
    return ", ".join(f"--{name.removeprefix('mesh.').replace('_', '-')}" for name in names)
