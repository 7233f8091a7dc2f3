"""Import of DeepSpeed's JSON configuration as options, with a report on each value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from accel_nb.config.import_report import ImportOutcome, ImportReport, NotImported, record_outcome
from accel_nb.config.message_text import quoted
from accel_nb.errors import ConfigError

_KNOWN = ("zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu", "bf16", "fp16")
_AUTO = "auto"
NO_DISK = (
    "offloading to disk is not served: it needs DeepSpeed's operator async_io, which is compiled with libaio where it "
    "runs; cpu is served"
)


def is_deepspeed(document: Mapping[str, Any]) -> bool:
    """Whether a document looks like DeepSpeed's."""
    return any(name in document for name in _KNOWN)


def import_deepspeed(document: Mapping[str, Any], source: str) -> ImportReport:
    """Return the options that correspond to a DeepSpeed configuration, and a report on each value.

    ``auto`` leaves a value open. Raises `ConfigError` for a document that is none.
    """
    if not is_deepspeed(document):
        raise ConfigError(f"{source}: holds no value of a DeepSpeed configuration, such as zero_optimization")
    found = ImportReport()
    values = dict(_flat(document))
    for name, value in values.items():
        if value in (_AUTO, None):
            found.needless[name] = "left open"
        elif name in _RULES:
            record_outcome(found, name, _RULES[name](value, values), source)
        else:
            found.left[name] = _SECTIONS.get(name.partition(".")[0], "no option of accel_nb stands for it")
    return found


def _flat(document: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    flat: list[tuple[str, Any]] = []
    for name, value in document.items():
        if isinstance(value, Mapping) and value:
            flat += _flat(cast("Mapping[str, Any]", value), f"{prefix}{name}.")
        else:
            flat.append((f"{prefix}{name}", cast(Any, value)))
    return flat


Rule = Callable[[Any, Mapping[str, Any]], ImportOutcome]


def _under(option: str) -> Rule:
    return lambda value, _values: {option: value}


def _needless(reason: str) -> Rule:
    return lambda _value, _values: reason


def _stage(value: Any, _values: Mapping[str, Any]) -> ImportOutcome:
    if value == 0:
        return "nothing is divided, as strategy auto has it"
    return {"strategy": "deepspeed", "deepspeed.zero_stage": value}


def _device(option: str) -> Rule:
    def rule(value: Any, _values: Mapping[str, Any]) -> ImportOutcome:
        if value == "nvme":
            return NotImported(NO_DISK)
        return {option: "no" if value == "none" else value}

    return rule


def _precision(name: str) -> Rule:
    return lambda value, _values: {"precision": name} if value is True else "off"


def _number(option: str) -> Rule:
    def rule(value: Any, _values: Mapping[str, Any]) -> ImportOutcome:
        # Files write 5e8, which is a real number there.
        return {option: int(value) if isinstance(value, float) and value.is_integer() else value}

    return rule


def _clip(value: Any, _values: Mapping[str, Any]) -> ImportOutcome:
    return {"clip": float(value)} if value else "off"


def _scale(value: Any, _values: Mapping[str, Any]) -> ImportOutcome:
    return (
        "the scale adapts itself" if value == 0 else NotImported("a fixed loss scale is not served; it adapts itself")
    )


def _power(value: Any, _values: Mapping[str, Any]) -> ImportOutcome:
    if isinstance(value, int) and 0 <= value < 64:
        return {"scaler.init_scale": float(2**value)}
    return NotImported(f"{quoted(value)} is no power of two")


def _if_on(reason: str) -> Rule:
    return lambda value, _values: NotImported(reason) if value else "off"


_ZERO = "zero_optimization"
_RULES: Mapping[str, Rule] = {
    f"{_ZERO}.stage": _stage,
    f"{_ZERO}.offload_optimizer.device": _device("deepspeed.offload_optimizer"),
    f"{_ZERO}.offload_param.device": _device("deepspeed.offload_parameters"),
    f"{_ZERO}.offload_optimizer.pin_memory": _needless("as the device needs it"),
    f"{_ZERO}.offload_param.pin_memory": _needless("as the device needs it"),
    f"{_ZERO}.reduce_bucket_size": _number("deepspeed.bucket_size"),
    f"{_ZERO}.allgather_bucket_size": _number("deepspeed.bucket_size"),
    f"{_ZERO}.overlap_comm": _under("deepspeed.overlap_comm"),
    f"{_ZERO}.contiguous_gradients": _needless("always"),
    f"{_ZERO}.reduce_scatter": _needless("always"),
    f"{_ZERO}.allgather_partitions": _needless("always"),
    f"{_ZERO}.stage3_prefetch_bucket_size": _number("deepspeed.prefetch_size"),
    f"{_ZERO}.stage3_param_persistence_threshold": _number("deepspeed.persistent_size"),
    f"{_ZERO}.stage3_gather_16bit_weights_on_model_save": _needless("save_model gathers weights by itself"),
    **dict.fromkeys(
        (
            f"{_ZERO}.sub_group_size",
            f"{_ZERO}.round_robin_gradients",
            f"{_ZERO}.stage3_max_live_parameters",
            f"{_ZERO}.stage3_max_reuse_distance",
        ),
        _needless("changes speed only, and stays as DeepSpeed has it"),
    ),
    "gradient_accumulation_steps": _under("accumulate"),
    "gradient_clipping": _clip,
    "train_batch_size": _needless("the loader and the number of workers say it"),
    "train_micro_batch_size_per_gpu": _needless("the loader says it"),
    "bf16.enabled": _precision("bf16"),
    "fp16.enabled": _precision("fp16"),
    "fp16.loss_scale": _scale,
    "fp16.initial_scale_power": _power,
    "fp16.loss_scale_window": _number("scaler.growth_interval"),
    "zero_allow_untested_optimizer": _under("deepspeed.allow_untested_optimizer"),
    "zero_force_ds_cpu_optimizer": _needless("the optimizer is the script's own"),
    "steps_per_print": _needless("the panel shows each step"),
    "wall_clock_breakdown": _if_on("the panel shows step times; Accelerator.profile shows more"),
}
_SECTIONS: Mapping[str, str] = {
    "optimizer": "the optimizer is made in the script",
    "scheduler": "the schedule is made in the script",
    "activation_checkpointing": "the option activation_checkpointing computes repeated blocks again",
    "aio": NO_DISK,
}
