"""FSDP's options under the names that `accelerate` knows them by: in its file, and as arguments of its plugin."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from accel_nb.config.import_report import ImportOutcome, NotImported
from accel_nb.config.message_text import quoted

_SHARDING = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
"""In the order of their numbers, which begin with 1."""

_WRAPS = {"SIZE_BASED_WRAP": "size", "NO_WRAP": "model"}


def fsdp_outcome(name: str, value: Any, values: Mapping[str, Any]) -> ImportOutcome:
    """Return what becomes of one of FSDP's values; ``values`` are all of them, by their names without ``fsdp_``.

    ``workers_of_a_machine`` among them says how many share one copy of the model where copies are one to a machine.
    """
    rule = _RULES.get(name)
    return NotImported("no option of accel_nb stands for it") if rule is None else rule(value, values)


def _version(value: Any, _values: Mapping[str, Any]) -> ImportOutcome:
    return (
        "it is FSDP2 in any case" if value in (1, 2, "1", "2") else NotImported(f"there is no version {quoted(value)}")
    )


def _sharding(value: Any, values: Mapping[str, Any]) -> ImportOutcome:
    if isinstance(value, int) and 1 <= value <= len(_SHARDING):
        value = _SHARDING[value - 1]
    kind = str(value).upper()
    if kind not in _SHARDING:
        return NotImported(f"{quoted(value)} is none of {', '.join(_SHARDING)}")
    if kind == "NO_SHARD":
        return NotImported("it divides nothing, as strategy ddp does: choose that")
    options: dict[str, Any] = {"fsdp.reshard_after_forward": kind in ("FULL_SHARD", "HYBRID_SHARD")}
    if kind.startswith("HYBRID"):
        size = values.get("workers_of_a_machine")
        if size is None:
            return NotImported("set fsdp.hybrid_shard_size to the number of workers of one machine")
        options["fsdp.hybrid_shard_size"] = size
    return options


def _resharding(value: Any, values: Mapping[str, Any]) -> ImportOutcome:
    if str(value).upper() in _SHARDING:
        return _sharding(value, values)
    return {"fsdp.reshard_after_forward": value}


def _wrap(value: Any, values: Mapping[str, Any]) -> ImportOutcome:
    kind = str(value).upper()
    if kind == "TRANSFORMER_BASED_WRAP":
        classes = _classes(values)
        return {"fsdp.wrap": "classes", "fsdp.classes": classes} if classes else {"fsdp.wrap": "blocks"}
    return {"fsdp.wrap": _WRAPS[kind]} if kind in _WRAPS else NotImported(f"{quoted(value)} is no known way to divide")


def _wrapped_classes(_value: Any, values: Mapping[str, Any]) -> ImportOutcome:
    if str(values.get("auto_wrap_policy", "TRANSFORMER_BASED_WRAP")).upper() != "TRANSFORMER_BASED_WRAP":
        return "nothing is chosen by class"
    return {"fsdp.wrap": "classes", "fsdp.classes": _classes(values)}


def _classes(values: Mapping[str, Any]) -> list[str]:
    named = next((values[name] for name in _CLASS_NAMES if values.get(name)), ())
    parts = named.split(",") if isinstance(named, str) else list(named)
    return [part.strip() for part in parts if part.strip()]


def _smallest(value: Any, values: Mapping[str, Any]) -> ImportOutcome:
    if str(values.get("auto_wrap_policy", "SIZE_BASED_WRAP")).upper() != "SIZE_BASED_WRAP":
        return "nothing is chosen by size"
    return {"fsdp.wrap": "size", "fsdp.min_params": value}


def _under(option: str) -> Callable[[Any, Mapping[str, Any]], ImportOutcome]:
    return lambda value, _values: {option: value}


def _needless(reason: str) -> Callable[[Any, Mapping[str, Any]], ImportOutcome]:
    return lambda _value, _values: reason


_CLASS_NAMES = ("transformer_layer_cls_to_wrap", "transformer_cls_names_to_wrap")
_AHEAD = "FSDP2 itself decides what is gathered ahead"

_RULES: Mapping[str, Callable[[Any, Mapping[str, Any]], ImportOutcome]] = {
    "version": _version,
    "sharding_strategy": _sharding,
    "reshard_after_forward": _resharding,
    "auto_wrap_policy": _wrap,
    **dict.fromkeys(_CLASS_NAMES, _wrapped_classes),
    "min_num_params": _smallest,
    "cpu_offload": _under("fsdp.cpu_offload"),
    "offload_params": _under("fsdp.cpu_offload"),
    "activation_checkpointing": _under("activation_checkpointing"),
    "state_dict_type": _needless("a checkpoint holds each worker's parts, and save_model writes the whole"),
    **dict.fromkeys(
        ("state_dict_config", "optim_state_dict_config"),
        _needless("get_state_dict and save_model give whole weights, in the memory of the main rank's machine"),
    ),
    "backward_prefetch": _needless(_AHEAD),
    "forward_prefetch": _needless(_AHEAD),
    "limit_all_gathers": _needless(_AHEAD),
    "use_orig_params": _needless("parameters keep their names and groups in any case"),
    "sync_module_states": _needless("rank 0's weights become everyone's in any case"),
    "cpu_ram_efficient_loading": _needless("a model built without memory is filled by fsdp.weights, part by part"),
}
