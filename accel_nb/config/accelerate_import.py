"""Import of the YAML file of `accelerate config` as options, with a report on each value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from accel_nb.config.deepspeed_import import import_deepspeed, is_deepspeed
from accel_nb.config.fsdp_import import fsdp_outcome
from accel_nb.config.import_report import (
    ImportOutcome,
    ImportReport,
    NotImported,
    Rule,
    imported_as,
    not_needed,
    record_outcome,
)
from accel_nb.config.message_text import quoted
from accel_nb.config.yaml_documents import read_document
from accel_nb.errors import ConfigError

_DEEPSPEED_FILE = "deepspeed_config.deepspeed_config_file"
_UNSET = (None, "", "no", "NO", "none", "None")


def import_file(path: str) -> tuple[dict[str, Any], ImportReport]:
    """Return a file of accelerate's or DeepSpeed's, and its import; of a DeepSpeed file that it names too.

    Raises `ConfigError` if one of them cannot be read, or is another file.
    """
    document = read_document(path)
    if is_deepspeed(document):
        return document, import_deepspeed(document, path)
    report = import_accelerate(document, path)
    named = dict(_flatten(document)).get(_DEEPSPEED_FILE)
    if isinstance(named, str) and named:
        del report.not_imported[_DEEPSPEED_FILE]
        report.not_needed[_DEEPSPEED_FILE] = "imported below"
        report.add(import_deepspeed(read_document(named), named), f"{named}: ")
    return document, report


def import_accelerate(document: Mapping[str, Any], source: str) -> ImportReport:
    """Return the options that correspond to the values of an accelerate config, and a report on each value.

    Raises `ConfigError` if the document has none of that file's names, since it is then most likely another file.
    """
    values = dict(_flatten(document))
    known = [name for name in values if name in _RULES or name.partition(".")[0] in _SECTIONS]
    if not known:
        raise ConfigError(
            f"{source}: has no value of an accelerate config file; give a file that `accelerate config` wrote"
        )
    report = ImportReport()
    for name, value in values.items():
        if value in _UNSET and name not in ("mixed_precision", "distributed_type"):
            report.not_needed[name] = "not set"
            continue
        rule = _RULES.get(name)
        section, _, inner = name.partition(".")
        if section == "fsdp_config" and inner:
            record_outcome(report, name, fsdp_outcome(inner.removeprefix("fsdp_"), value, _fsdp_values(values)), source)
            continue
        if rule is None:
            report.not_imported[name] = _SECTIONS.get(section) or "accel_nb has no such option"
            continue
        record_outcome(report, name, rule(value, values), source)
    return report


def _flatten(document: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    flat: list[tuple[str, Any]] = []
    for name, value in document.items():
        if isinstance(value, dict) and value and not prefix:
            flat += _flatten(cast("dict[str, Any]", value), f"{name}.")
        else:
            flat.append((f"{prefix}{name}", value if not isinstance(value, dict) else None))
    return flat


def _fsdp_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return FSDP's values by names without the file's prefix, and the workers per machine if the file sets them."""
    inner = {name.partition("fsdp_config.fsdp_")[2]: value for name, value in values.items()}
    inner.pop("", None)
    workers, machines = values.get("num_processes"), values.get("num_machines", 1)
    if isinstance(workers, int) and isinstance(machines, int) and machines > 0 and workers % machines == 0:
        inner["workers_of_a_machine"] = workers // machines
    return inner


def _machine(value: Any, _values: Mapping[str, Any]) -> ImportOutcome:
    return "this machine is used" if value == "LOCAL_MACHINE" else NotImported(f"{quoted(value)} is not supported")


def _distributed(value: Any, values: Mapping[str, Any]) -> ImportOutcome:
    if value in ("XLA", "TPU"):
        # The file counts a process for each chip; here one worker drives all chips.
        return {"strategy": "xla"} if values.get("use_cpu") is True else {"strategy": "xla", "tpus": "all"}
    if value in ("NO", "no", "MULTI_CPU", "MULTI_GPU"):
        return "strategy auto chooses it"
    if str(value).startswith("MULTI_"):
        return NotImported(f"accel_nb does not support the hardware of {quoted(value)}")
    return {"strategy": str(value).lower()}


def _workers(value: Any, values: Mapping[str, Any]) -> ImportOutcome:
    on_cpu = values.get("use_cpu") is True or values.get("distributed_type") == "MULTI_CPU"
    if values.get("distributed_type") in ("XLA", "TPU") and not on_cpu:
        return "one worker drives all chips"
    machines = values.get("num_machines", 1)
    if isinstance(value, int) and isinstance(machines, int) and machines > 1:
        if value % machines:
            return NotImported(f"{value} processes cannot be divided equally among {machines} machines")
        value //= machines
    return {"cpus" if on_cpu else "gpus": value}


def _use_cpu(value: Any, values: Mapping[str, Any]) -> ImportOutcome:
    if value is True and values.get("num_processes") is None and values.get("distributed_type") not in ("XLA", "TPU"):
        return {"cpus": 1}
    return "see num_processes"


def _devices(value: Any, _values: Mapping[str, Any]) -> ImportOutcome:
    if value == "all":
        return "every visible GPU may be used"
    return NotImported(f"set CUDA_VISIBLE_DEVICES={value} before the notebook or script starts")


def _num_machines(value: Any, _values: Mapping[str, Any]) -> ImportOutcome:
    return (
        "one machine"
        if value in (0, 1)
        else NotImported("the number of machines is an argument of a launch: accel-nb launch --nnodes N")
    )


def _machine_rank(value: Any, _values: Mapping[str, Any]) -> ImportOutcome:
    return (
        "the first machine"
        if value == 0
        else NotImported(f"this machine's number is an argument of a launch: --node-rank {value}")
    )


def _unsupported_switch(value: Any, _values: Mapping[str, Any]) -> ImportOutcome:
    return NotImported("accel_nb has no such option") if value else "off"


_RULES: Mapping[str, Rule] = {
    "compute_environment": _machine,
    "distributed_type": _distributed,
    "num_processes": _workers,
    "use_cpu": _use_cpu,
    "gpu_ids": _devices,
    "mixed_precision": imported_as("precision"),
    "debug": imported_as("debug"),
    "num_machines": _num_machines,
    "machine_rank": _machine_rank,
    "main_training_function": not_needed("a script is run as it is"),
    "same_network": not_needed("it has no effect in accel_nb"),
    "rdzv_backend": not_needed("local workers need no rendezvous server"),
    "enable_cpu_affinity": _unsupported_switch,
    "downcast_bf16": _unsupported_switch,
    "tpu_use_cluster": _unsupported_switch,
    "tpu_use_sudo": _unsupported_switch,
    "tpu_env": _unsupported_switch,
    "dynamo_config.dynamo_backend": imported_as("compile.backend", lambda value: str(value).lower()),
    "dynamo_config.dynamo_mode": imported_as("compile.mode"),
    "dynamo_config.dynamo_use_dynamic": imported_as(
        "compile.dynamic", lambda value: ("yes" if value else "no") if isinstance(value, bool) else value
    ),
    "dynamo_config.dynamo_use_fullgraph": imported_as("compile.fullgraph"),
    "dynamo_config.dynamo_use_regional_compilation": imported_as("compile.regional"),
    "deepspeed_config.zero_stage": imported_as("deepspeed.zero_stage"),
    "deepspeed_config.offload_optimizer_device": imported_as("deepspeed.offload_optimizer"),
    "deepspeed_config.offload_param_device": imported_as("deepspeed.offload_parameters"),
    "deepspeed_config.zero3_init_flag": not_needed("models are built whole, and partitioned when they are prepared"),
    "deepspeed_config.zero3_save_16bit_model": not_needed("save_model always gathers the weights"),
    _DEEPSPEED_FILE: lambda value, _values: NotImported(f"import the file {quoted(value)} instead"),
    "deepspeed_config.gradient_accumulation_steps": imported_as("accumulate"),
    "deepspeed_config.gradient_clipping": imported_as("clip"),
}
"""The rule for each value. `record_outcome` reports a value as not imported if `resolve` rejects its options."""

_SECTIONS: Mapping[str, str] = {
    "deepspeed_config": "accel_nb has no such option",
    "fsdp_config": "accel_nb has no such option",
    "fp8_config": "accel_nb uses torchao for fp8: set precision to fp8, and the options of the section fp8",
    "megatron_lm_config": "Megatron-LM is not supported",
    "parallelism_config": "set mesh.tp, mesh.cp and fsdp.hybrid_shard_size instead",
    "mpirun_config": "start the workers with mpirun itself",
    "dynamo_config": "accel_nb has no such option",
}
"""The reason why values without a rule are not imported, by section."""
