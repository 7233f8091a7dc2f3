"""Import of DeepSpeed's JSON configuration as options, with a report on each value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

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
from accel_nb.errors import ConfigError

_KNOWN = ("zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu", "bf16", "fp16")
_AUTO = "auto"
NO_DISK = (
    "offloading to disk is not supported: it needs DeepSpeed's operator async_io, which is compiled with libaio on the "
    "machine where it runs; use cpu"
)


def is_deepspeed(document: Mapping[str, Any]) -> bool:
    """Return whether a document has a top-level key of a DeepSpeed configuration."""
    return any(name in document for name in _KNOWN)


def import_deepspeed(document: Mapping[str, Any], source: str) -> ImportReport:
    """Return the options that correspond to a DeepSpeed configuration, and a report on each value.

    A value ``auto`` counts as not set. Raises `ConfigError` for a document that is not a DeepSpeed configuration.
    """
    if not is_deepspeed(document):
        raise ConfigError(f"{source}: has no value of a DeepSpeed configuration, such as zero_optimization")
    report = ImportReport()
    values = dict(_flatten(document))
    for name, value in values.items():
        if value in (_AUTO, None):
            report.not_needed[name] = "not set"
        elif (section := _section_that_is_off(name, values)) is not None:
            report.not_needed[name] = f"{section} is off"
        elif name in _RULES:
            record_outcome(report, name, _RULES[name](value, values), source)
        else:
            report.not_imported[name] = _SECTIONS.get(name.partition(".")[0], "accel_nb has no such option")
    return report


def _section_that_is_off(name: str, values: Mapping[str, Any]) -> str | None:
    """Return the section of a value, if its ``enabled`` is false; the report has ``enabled`` itself by its rule."""
    section, _, last = name.rpartition(".")
    is_off = values.get(f"{section}.enabled") is False and (last != "enabled" or name not in _RULES)
    return section if is_off else None


def _flatten(document: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    flat: list[tuple[str, Any]] = []
    for name, value in document.items():
        if isinstance(value, Mapping) and value:
            flat += _flatten(cast("Mapping[str, Any]", value), f"{prefix}{name}.")
        else:
            flat.append((f"{prefix}{name}", cast(Any, value)))
    return flat


def _zero_stage(value: Any, _values: Mapping[str, Any]) -> ImportOutcome:
    if value == 0:
        return "nothing is partitioned, as by strategy ddp"
    return {"strategy": "deepspeed", "deepspeed.zero_stage": value}


def _device(option: str) -> Rule:
    def rule(value: Any, _values: Mapping[str, Any]) -> ImportOutcome:
        if value == "nvme":
            return NotImported(NO_DISK)
        return {option: "no" if value == "none" else value}

    return rule


def _precision(name: str) -> Rule:
    return lambda value, _values: {"precision": name} if value is True else "off"


def _whole_number(option: str) -> Rule:
    def rule(value: Any, _values: Mapping[str, Any]) -> ImportOutcome:
        # Files may contain 5e8, which JSON reads as a float.
        return {option: int(value) if isinstance(value, float) and value.is_integer() else value}

    return rule


def _clip(value: Any, _values: Mapping[str, Any]) -> ImportOutcome:
    return {"clip": float(value)} if value else "off"


def _scale(value: Any, _values: Mapping[str, Any]) -> ImportOutcome:
    return (
        "the loss scale is dynamic"
        if value == 0
        else NotImported("a fixed loss scale is not supported; it is always dynamic")
    )


def _power(value: Any, _values: Mapping[str, Any]) -> ImportOutcome:
    if isinstance(value, int) and 0 <= value < 64:
        return {"scaler.init_scale": float(2**value)}
    return NotImported(f"{quoted(value)} is not an exponent from 0 to 63")


def _if_on(reason: str) -> Rule:
    return lambda value, _values: NotImported(reason) if value else "off"


_ZERO = "zero_optimization"
_RULES: Mapping[str, Rule] = {
    f"{_ZERO}.stage": _zero_stage,
    f"{_ZERO}.offload_optimizer.device": _device("deepspeed.offload_optimizer"),
    f"{_ZERO}.offload_param.device": _device("deepspeed.offload_parameters"),
    f"{_ZERO}.offload_optimizer.pin_memory": not_needed("memory is pinned if there are GPUs"),
    f"{_ZERO}.offload_param.pin_memory": not_needed("memory is pinned if there are GPUs"),
    f"{_ZERO}.reduce_bucket_size": _whole_number("deepspeed.bucket_size"),
    f"{_ZERO}.allgather_bucket_size": _whole_number("deepspeed.bucket_size"),
    f"{_ZERO}.overlap_comm": imported_as("deepspeed.overlap_comm"),
    f"{_ZERO}.contiguous_gradients": not_needed("always on"),
    f"{_ZERO}.reduce_scatter": not_needed("always on"),
    f"{_ZERO}.allgather_partitions": not_needed("always on"),
    f"{_ZERO}.stage3_prefetch_bucket_size": _whole_number("deepspeed.prefetch_size"),
    f"{_ZERO}.stage3_param_persistence_threshold": _whole_number("deepspeed.persistent_size"),
    f"{_ZERO}.stage3_gather_16bit_weights_on_model_save": not_needed("save_model always gathers the weights"),
    **dict.fromkeys(
        (
            f"{_ZERO}.sub_group_size",
            f"{_ZERO}.round_robin_gradients",
            f"{_ZERO}.stage3_max_live_parameters",
            f"{_ZERO}.stage3_max_reuse_distance",
            f"{_ZERO}.stage3_model_persistence_threshold",
            f"{_ZERO}.stage3_use_all_reduce_for_fetch_params",
            f"{_ZERO}.memory_efficient_linear",
            f"{_ZERO}.use_multi_rank_bucket_allreduce",
            f"{_ZERO}.zero_hpz_partition_size",
            f"{_ZERO}.offload_optimizer.buffer_count",
            f"{_ZERO}.offload_optimizer.fast_init",
            f"{_ZERO}.offload_optimizer.pipeline_read",
            f"{_ZERO}.offload_optimizer.pipeline_write",
            f"{_ZERO}.offload_param.buffer_count",
            f"{_ZERO}.offload_param.buffer_size",
            f"{_ZERO}.offload_param.max_in_cpu",
        ),
        not_needed("changes speed and memory only; DeepSpeed's default is used"),
    ),
    f"{_ZERO}.cpu_offload": lambda value, _values: {"deepspeed.offload_optimizer": "cpu"} if value else "off",
    "gradient_accumulation_steps": imported_as("accumulate"),
    "gradient_clipping": _clip,
    "train_batch_size": not_needed("the loader and the number of workers determine it"),
    "train_micro_batch_size_per_gpu": not_needed("the loader determines it"),
    "bf16.enabled": _precision("bf16"),
    "fp16.enabled": _precision("fp16"),
    "fp16.loss_scale": _scale,
    "fp16.initial_scale_power": _power,
    "fp16.loss_scale_window": _whole_number("scaler.growth_interval"),
    **dict.fromkeys(
        ("fp16.hysteresis", "fp16.consecutive_hysteresis"), not_needed("the loss scale falls at every overflow")
    ),
    "fp16.min_loss_scale": not_needed("the loss scale has no lower limit"),
    **dict.fromkeys(("fp16.auto_cast", "bf16.auto_cast"), not_needed("inputs are cast where they are used")),
    "zero_allow_untested_optimizer": imported_as("deepspeed.allow_untested_optimizer"),
    "zero_force_ds_cpu_optimizer": not_needed("the script's own optimizer is used"),
    "steps_per_print": not_needed("the panel shows each step"),
    "wall_clock_breakdown": _if_on("the panel shows step times; Accelerator.profile shows more"),
}
_SECTIONS: Mapping[str, str] = {
    "optimizer": "create the optimizer in the script",
    "scheduler": "create the schedule in the script",
    "activation_checkpointing": "set the option activation_checkpointing, which recomputes repeated blocks",
    "aio": NO_DISK,
}
