"""Rules between options: combinations that are not allowed, and options that have no effect."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from accel_nb.config.engine_section import LOCALHOST
from accel_nb.config.schema import MODEL_PARALLEL_STRATEGIES, OPTIONS, STRATEGIES, STRATEGY_SECTIONS, Config


@dataclass(frozen=True, slots=True)
class OptionConflict:
    """Options whose values are valid but cannot be combined; ``message`` is the reason and the remedy."""

    options: tuple[str, ...]
    message: str


ALTERNATIVES = (("gpus", "cpus"), ("gpus", "tpus"), ("cpus", "tpus"))
"""Pairs of options that exclude each other; the option from the source that takes precedence replaces the other one."""


def find_conflicts(config: Config) -> list[OptionConflict]:
    """Return the combinations of options in a config that are not allowed."""
    found = [
        OptionConflict((first, second), "only one of the two can be given; remove one")
        for first, second in ALTERNATIVES
        if getattr(config, first) is not None and getattr(config, second) is not None
    ]
    if not config.bring_back and config.pull:
        found.append(
            OptionConflict(
                ("pull", "bring_back"), "no names are returned to the notebook, so none can be pulled; remove one"
            )
        )
    if config.background and config.max_restarts:
        found.append(
            OptionConflict(
                ("background", "max_restarts"), "a run in the background is not started again; remove one of the two"
            )
        )
    if config.fsdp.wrap == "classes" and not config.fsdp.classes:
        found.append(OptionConflict(("fsdp.wrap",), "no classes are given; set fsdp.classes"))
    if config.fsdp.float8_gather and config.precision == "fp8" and config.fp8.recipe != "tensorwise":
        message = (
            f"{config.fp8.recipe} scales weights by rows and by columns, which needs the unrounded weights: use "
            "tensorwise"
        )
        found.append(OptionConflict(("fp8.recipe", "fsdp.float8_gather"), message))
    if config.fsdp.float8_gather and config.fsdp.cpu_offload:
        message = "weights in host memory are gathered in the format of the computation; remove one of the two"
        found.append(OptionConflict(("fsdp.float8_gather", "fsdp.cpu_offload"), message))
    if config.checkpoint.dir is None and config.checkpoint.every is not None:
        found.append(
            OptionConflict(
                ("checkpoint.every",), "it has no folder to save to; give one with --checkpoint DIR (checkpoint.dir)"
            )
        )
    if config.checkpoint.dir is None and config.checkpoint.resume == "auto":
        found.append(
            OptionConflict(
                ("checkpoint.resume",),
                "auto searches checkpoint.dir, which is not set; give it with --checkpoint DIR, or name a checkpoint",
            )
        )
    if config.engine.kind == "local" and config.engine.nodes > 1:
        message = "the local engine runs on this machine only; name another engine, such as --engine ssh"
        found.append(OptionConflict(("engine.nodes",), message))
    if config.engine.hosts.count(LOCALHOST) > 1 and config.gpus is not None:
        message = "localhost is named several times, and its GPUs belong to one node; use cpus to try several nodes"
        found.append(OptionConflict(("engine.hosts", "gpus"), message))
    if config.engine.kind in ("ssh", "kubernetes") and not config.engine.hosts:
        message = "the machines are not named; give them with --engine.hosts HOST,HOST"
        found.append(OptionConflict(("engine.hosts",), message))
    if config.engine.kind != "local" and config.gpus in (None, "all") and config.cpus is None:
        message = "the devices of other machines are not counted; give the workers of each node as --gpus N or --cpus N"
        found.append(OptionConflict(("engine.kind",), message))
    found += _mesh_conflicts(config)
    size_from = "cpus" if config.gpus is None else "gpus"
    size = getattr(config, size_from)
    if isinstance(size, int) and (config.gpus is None or config.cpus is None):
        problems = world_problems(config, size * config.engine.nodes)
        found += [OptionConflict((option, size_from), message) for option, message in problems.items()]
    return found


def world_problems(config: Config, size: int) -> dict[str, str]:
    """Return a message for each option that does not fit a world of ``size``, by option."""
    problems = rank_problems(config, size)
    rest = size
    for name in ("tp", "pp", "ep", "cp"):
        degree = getattr(config.mesh, name)
        if rest % degree:
            degrees = ", ".join(str(number) for number in range(1, rest + 1) if rest % number == 0)
            problems[f"mesh.{name}"] = f"{degree} does not divide {rest} workers; use {degrees}"
            break
        rest //= 1 if name == "ep" else degree
    return problems


_MODEL_PARALLEL_OPTIONS = {
    "mesh.tp": ("divided layers", "divide layers"),
    "mesh.cp": ("divided sequences", "divide sequences"),
    "mesh.pp": ("stages", "compute in stages"),
    "mesh.ep": ("divided experts", "divide experts"),
}


def _mesh_conflicts(config: Config) -> list[OptionConflict]:
    found: list[OptionConflict] = []
    divided = [name for name in ("tp", "cp", "pp", "ep") if getattr(config.mesh, name) > 1]
    for option, (what, does) in _MODEL_PARALLEL_OPTIONS.items():
        if option.removeprefix("mesh.") not in divided:
            continue
        if config.strategy in STRATEGIES and config.strategy not in MODEL_PARALLEL_STRATEGIES:
            possible = ", ".join(MODEL_PARALLEL_STRATEGIES)
            message = f"strategy {config.strategy} does not {does}; use {possible}, or remove {option}"
            found.append(OptionConflict(("strategy", option), message))
        if config.tpus is not None:
            found.append(
                OptionConflict(("tpus", option), "on a TPU the mesh divides the data only; remove one of the two")
            )
        if config.precision in ("fp16", "fp8"):
            message = f"{what} support precision no, bf16 and auto; change one of the two"
            found.append(OptionConflict(("precision", option), message))
        if config.compile.backend != "no":
            message = f"{what} are not compiled; remove one of the two"
            found.append(OptionConflict(("compile.backend", option), message))
    if config.mesh.ep > 1 and config.mesh.pp > 1:
        message = "expert and pipeline parallelism cannot be combined; set one of the two to 1"
        found.append(OptionConflict(("mesh.ep", "mesh.pp"), message))
    if config.mesh.cp > 1 and config.mesh.pp > 1:
        message = "sequence and pipeline parallelism cannot be combined; set one of the two to 1"
        found.append(OptionConflict(("mesh.cp", "mesh.pp"), message))
    stages = config.mesh.pp * config.mesh.stages_per_rank
    if config.mesh.split_points and len(config.mesh.split_points) != stages - 1:
        message = f"{len(config.mesh.split_points)} split points make {len(config.mesh.split_points) + 1} stages"
        if config.mesh.stages_per_rank > 1:
            message += f", and there are {stages}: {config.mesh.stages_per_rank} on each of {config.mesh.pp} workers"
        else:
            message += f", and mesh.pp is {config.mesh.pp}"
        found.append(OptionConflict(("mesh.split_points", "mesh.pp"), message))
    if config.mesh.stages_per_rank > 1 and config.mesh.pp == 1:
        message = "stages are divided among the workers of mesh.pp; set it to 2 or more, or remove mesh.stages_per_rank"
        found.append(OptionConflict(("mesh.stages_per_rank", "mesh.pp"), message))
    return found


def rank_problems(config: Config, size: int) -> dict[str, str]:
    """Return a message for each option that names a rank outside of a world of ``size``, by option."""
    problems: dict[str, str] = {}
    for option in ("ranks", "show_ranks"):
        value = getattr(config, option)
        ranks = cast("tuple[int, ...]", value) if isinstance(value, tuple) else ()
        outside = [rank for rank in ranks if rank >= size]
        if outside:
            listed = ", ".join(map(str, outside))
            problems[option] = f"rank {listed} is outside of a world of {size}; ranks go from 0 to {size - 1}"
    return problems


def find_unused_options(config: Config, given: Mapping[str, Any]) -> dict[str, str]:
    """Return the reason for each given option that has no effect in this config."""
    unused = {
        name: f"it belongs to {option.section}, and strategy is {config.strategy}"
        for name in given
        if (option := OPTIONS[name]).section in STRATEGY_SECTIONS and config.strategy not in ("auto", option.section)
    }
    hook = config.ddp.comm_hook
    for name, wrap in (("min_params", "size"), ("classes", "classes")):
        if f"fsdp.{name}" in given and config.fsdp.wrap != wrap:
            unused.setdefault(f"fsdp.{name}", f"fsdp.wrap is {config.fsdp.wrap}")
    for name in ("offload_parameters", "prefetch_size", "persistent_size", "weights"):
        if f"deepspeed.{name}" in given and config.deepspeed.zero_stage < 3:
            unused.setdefault(f"deepspeed.{name}", f"deepspeed.zero_stage is {config.deepspeed.zero_stage}")
    for name in given:
        if name.startswith("engine.") and name not in ("engine.kind", "engine.nodes") and config.engine.kind == "local":
            unused[name] = "engine.kind is local"
        if name == "ddp.comm_wrapper" and hook == "no" and config.ddp.comm_wrapper != "no":
            unused.setdefault(name, "it wraps ddp.comm_hook, which is no")
        if name.startswith("ddp.power_sgd_") and hook != "power_sgd":
            unused.setdefault(name, f"ddp.comm_hook is {hook}")
    if config.memory is not None and config.strategy != "auto" and "memory" in given:
        unused["memory"] = f"only strategy auto forecasts memory, and strategy is {config.strategy}"
    for name in given:
        if (name.startswith("fp8.") or name == "fsdp.float8_gather") and config.precision != "fp8":
            unused[name] = f"precision is {config.precision}"
        if name.startswith("scaler.") and config.precision not in ("fp16", "auto"):
            unused[name] = f"precision is {config.precision}"
        if name.startswith("compile.") and name != "compile.backend" and config.compile.backend == "no":
            unused[name] = "compile.backend is no"
    if config.mesh.pp == 1 and "mesh.micro_batches" in given:
        unused["mesh.micro_batches"] = "mesh.pp is 1"
    if config.static and not config.panel and "static" in given:
        unused["static"] = "the panel is off"
    if "data.data_seed" in given and not config.data.use_seedable_sampler:
        unused["data.data_seed"] = "data.use_seedable_sampler is off"
    if config.metrics.statsd is None and "metrics.statsd_tags" in given:
        unused["metrics.statsd_tags"] = "metrics.statsd is not set"
    if config.notify.url is None and config.notify.command is None and "notify.after" in given:
        unused["notify.after"] = "neither notify.url nor notify.command is set"
    if config.checkpoint.dir is None and "checkpoint.total_limit" in given:
        unused["checkpoint.total_limit"] = "checkpoint.dir is not set, so no checkpoint is named step_N"
    return unused
