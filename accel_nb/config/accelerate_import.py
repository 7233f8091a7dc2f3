"""The YAML file of `accelerate config`, read into options: what is taken, what is not needed, what is left behind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from accel_nb.config.fsdp_import import fsdp_outcome
from accel_nb.config.import_report import ImportOutcome, ImportReport, NotImported, record_outcome
from accel_nb.config.message_text import quoted
from accel_nb.errors import ConfigError

_UNSET = (None, "", "no", "NO", "none", "None")


def import_accelerate(document: Mapping[str, Any], source: str) -> ImportReport:
    """Return the options that an accelerate config's values stand for.

    Each value of the file is accounted for. Raises `ConfigError` if nothing in the document is one of that file's
    names, so that it is most likely another file.
    """
    values = dict(_flat(document))
    known = [name for name in values if name in _RULES or name.partition(".")[0] in _SECTIONS]
    if not known:
        raise ConfigError(f"{source}: holds no value of an accelerate config file; give the file that it wrote")
    found = ImportReport()
    for name, value in values.items():
        if value in _UNSET and name not in ("mixed_precision", "distributed_type"):
            found.needless[name] = "not set"
            continue
        rule = _RULES.get(name)
        section, _, inner = name.partition(".")
        if section == "fsdp_config" and inner:
            record_outcome(found, name, fsdp_outcome(inner.removeprefix("fsdp_"), value, _fsdp_values(values)), source)
            continue
        if rule is None:
            found.left[name] = _SECTIONS.get(section) or "no option of accel_nb stands for it"
            continue
        record_outcome(found, name, rule(value, values), source)
    return found


def _flat(document: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    flat: list[tuple[str, Any]] = []
    for name, value in document.items():
        if isinstance(value, dict) and value and not prefix:
            flat += _flat(cast("dict[str, Any]", value), f"{name}.")
        else:
            flat.append((f"{prefix}{name}", value if not isinstance(value, dict) else None))
    return flat


Rule = Callable[[Any, Mapping[str, Any]], ImportOutcome]


def _fsdp_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return FSDP's values by their names outside of the file, and how many workers a machine has, if that is said."""
    inner = {name.partition("fsdp_config.fsdp_")[2]: value for name, value in values.items()}
    inner.pop("", None)
    workers, machines = values.get("num_processes"), values.get("num_machines", 1)
    if isinstance(workers, int) and isinstance(machines, int) and machines > 0 and workers % machines == 0:
        inner["workers_of_a_machine"] = workers // machines
    return inner


def _machine(value: Any, _values: Mapping[str, Any]) -> ImportOutcome:
    return "this machine is meant" if value == "LOCAL_MACHINE" else NotImported(f"{quoted(value)} is not served")


def _distributed(value: Any, _values: Mapping[str, Any]) -> ImportOutcome:
    if value in ("NO", "no", "MULTI_CPU", "MULTI_GPU"):
        return "strategy auto does so"
    if str(value).startswith("MULTI_"):
        return NotImported(f"{quoted(value)} is hardware that accel_nb does not train on")
    return {"strategy": str(value).lower()}


def _workers(value: Any, values: Mapping[str, Any]) -> ImportOutcome:
    on_cpu = values.get("use_cpu") is True or values.get("distributed_type") == "MULTI_CPU"
    machines = values.get("num_machines", 1)
    if isinstance(value, int) and isinstance(machines, int) and machines > 1:
        if value % machines:
            return NotImported(f"{value} processes are not the same number on each of {machines} machines")
        value //= machines
    return {"cpus" if on_cpu else "gpus": value}


def _devices(value: Any, _values: Mapping[str, Any]) -> ImportOutcome:
    if value == "all":
        return "every visible GPU may be used"
    return NotImported(f"set CUDA_VISIBLE_DEVICES={value} before the notebook or script starts")


def _one(value: Any, _values: Mapping[str, Any]) -> ImportOutcome:
    return (
        "one machine"
        if value in (0, 1)
        else NotImported("several machines are an argument of a launch: accel-nb launch --nnodes N")
    )


def _first(value: Any, _values: Mapping[str, Any]) -> ImportOutcome:
    return (
        "the first machine"
        if value == 0
        else NotImported(f"this machine's number is an argument of a launch: --node-rank {value}")
    )


def _switch(value: Any, _values: Mapping[str, Any]) -> ImportOutcome:
    return NotImported("no option of accel_nb stands for it") if value else "off"


def _under(option: str, change: Callable[[Any], Any] = lambda value: value) -> Rule:
    return lambda value, _values: {option: change(value)}


def _needless(reason: str) -> Rule:
    return lambda _value, _values: reason


_RULES: Mapping[str, Rule] = {
    "compute_environment": _machine,
    "distributed_type": _distributed,
    "num_processes": _workers,
    "use_cpu": _needless("see num_processes"),
    "gpu_ids": _devices,
    "mixed_precision": _under("precision"),
    "debug": _under("debug"),
    "num_machines": _one,
    "machine_rank": _first,
    "main_training_function": _needless("a script is run as it is"),
    "same_network": _needless("nothing depends on it"),
    "rdzv_backend": _needless("local workers meet in memory of their own"),
    "enable_cpu_affinity": _switch,
    "downcast_bf16": _switch,
    "tpu_use_cluster": _switch,
    "tpu_use_sudo": _switch,
    "tpu_env": _switch,
    "dynamo_config.dynamo_backend": _under("compile.backend", lambda value: str(value).lower()),
    "dynamo_config.dynamo_mode": _under("compile.mode"),
    "dynamo_config.dynamo_use_dynamic": _under(
        "compile.dynamic", lambda value: {True: "yes", False: "no"}.get(value, value)
    ),
    "dynamo_config.dynamo_use_fullgraph": _under("compile.fullgraph"),
    "dynamo_config.dynamo_use_regional_compilation": _under("compile.regional"),
    "deepspeed_config.zero_stage": _under("deepspeed.zero_stage"),
    "deepspeed_config.offload_optimizer_device": _under("deepspeed.offload_optimizer"),
    "deepspeed_config.offload_param_device": _under("deepspeed.offload_parameters"),
    "deepspeed_config.zero3_init_flag": _needless("a model is built as it is, and divided from there"),
    "deepspeed_config.zero3_save_16bit_model": _needless("save_model gathers weights by itself"),
    "deepspeed_config.deepspeed_config_file": lambda value, _values: NotImported(f"import {quoted(value)} itself"),
    "deepspeed_config.gradient_accumulation_steps": _under("accumulate"),
    "deepspeed_config.gradient_clipping": _under("clip"),
}
"""What to do with each value; an option that does not exist makes `resolve` say so, and the value is left behind."""

_SECTIONS: Mapping[str, str] = {
    "deepspeed_config": "no option of accel_nb stands for it",
    "fsdp_config": "no option of accel_nb stands for it",
    "fp8_config": "fp8 is torchao's here: set precision to fp8, and the options of the section fp8",
    "megatron_lm_config": "Megatron-LM is not served",
    "parallelism_config": "parallelism beyond data is not served by this version",
    "mpirun_config": "start the workers with mpirun itself",
    "dynamo_config": "no option of accel_nb stands for it",
}
