"""Import of FSDP's options from the names of Hugging Face Accelerate's config file and plugin."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

from accel_nb.config.import_report import ImportOutcome, NotImported, Rule, imported_as, not_needed
from accel_nb.config.message_text import quoted

_SHARDING = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
"""Sharding strategies in the order of accelerate's numbers, which start at 1."""

_WRAPS = {"SIZE_BASED_WRAP": "size", "NO_WRAP": "model"}


def fsdp_outcome(name: str, value: Any, values: Mapping[str, Any]) -> ImportOutcome:
    """Return the result for one of FSDP's values; ``values`` are all of them, by their names without ``fsdp_``.

    The value ``workers_of_a_machine`` is the number of workers that share a replica in a hybrid sharding strategy.
    """
    rule = _RULES.get(name)
    return NotImported("accel_nb has no such option") if rule is None else rule(value, values)


def _version(value: Any, _values: Mapping[str, Any]) -> ImportOutcome:
    return (
        "accel_nb always uses FSDP2"
        if value in (1, 2, "1", "2")
        else NotImported(f"there is no version {quoted(value)}")
    )


def _sharding(value: Any, values: Mapping[str, Any]) -> ImportOutcome:
    text = str(value).strip()
    if text.isdecimal() and 1 <= int(text) <= len(_SHARDING):
        text = _SHARDING[int(text) - 1]
    kind = text.upper().removeprefix("_")  # torch's member is `_HYBRID_SHARD_ZERO2`
    if kind not in _SHARDING:
        return NotImported(f"{quoted(value)} is not one of {', '.join(_SHARDING)}")
    if kind == "NO_SHARD":
        return NotImported("it shards nothing: use strategy ddp")
    options: dict[str, Any] = {"fsdp.reshard_after_forward": kind in ("FULL_SHARD", "HYBRID_SHARD")}
    if kind.startswith("HYBRID"):
        size = values.get("workers_of_a_machine")
        if size is None:
            return NotImported("set fsdp.hybrid_shard_size to the number of workers of one machine")
        options["fsdp.hybrid_shard_size"] = size
    return options


def _resharding(value: Any, values: Mapping[str, Any]) -> ImportOutcome:
    if str(value).upper().removeprefix("_") in _SHARDING:
        return _sharding(value, values)
    return {"fsdp.reshard_after_forward": value}


def _wrap(value: Any, values: Mapping[str, Any]) -> ImportOutcome:
    kind = str(value).upper()
    if kind == "TRANSFORMER_BASED_WRAP":
        classes = _classes(values)
        return {"fsdp.wrap": "classes", "fsdp.classes": classes} if classes else {"fsdp.wrap": "blocks"}
    return {"fsdp.wrap": _WRAPS[kind]} if kind in _WRAPS else NotImported(f"{quoted(value)} is not a known wrap policy")


def _wrapped_classes(_value: Any, values: Mapping[str, Any]) -> ImportOutcome:
    if str(values.get("auto_wrap_policy", "TRANSFORMER_BASED_WRAP")).upper() != "TRANSFORMER_BASED_WRAP":
        return "auto_wrap_policy does not use classes"
    return {"fsdp.wrap": "classes", "fsdp.classes": _classes(values)}


def _classes(values: Mapping[str, Any]) -> Any:
    """Return the class names. A value of another type is returned unchanged; `resolve` rejects it."""
    named: Any = next((values[name] for name in _CLASS_NAMES if values.get(name)), ())
    if isinstance(named, str):
        named = named.split(",")
    if not isinstance(named, list | tuple | set | frozenset):
        return named
    parts = list(cast("Iterable[Any]", named))
    return [part.strip() for part in parts if part.strip()] if all(isinstance(part, str) for part in parts) else parts


def _min_params(value: Any, values: Mapping[str, Any]) -> ImportOutcome:
    if str(values.get("auto_wrap_policy", "SIZE_BASED_WRAP")).upper() != "SIZE_BASED_WRAP":
        return "auto_wrap_policy does not use sizes"
    return {"fsdp.wrap": "size", "fsdp.min_params": value}


_CLASS_NAMES = ("transformer_layer_cls_to_wrap", "transformer_cls_names_to_wrap")
_PREFETCH_REASON = "FSDP2 itself chooses which parameters it prefetches"

_RULES: Mapping[str, Rule] = {
    "version": _version,
    "sharding_strategy": _sharding,
    "reshard_after_forward": _resharding,
    "auto_wrap_policy": _wrap,
    **dict.fromkeys(_CLASS_NAMES, _wrapped_classes),
    "min_num_params": _min_params,
    "cpu_offload": imported_as("fsdp.cpu_offload"),
    "offload_params": imported_as("fsdp.cpu_offload"),
    "activation_checkpointing": imported_as("activation_checkpointing"),
    "state_dict_type": not_needed("a checkpoint contains each worker's shards, and save_model writes whole weights"),
    **dict.fromkeys(
        ("state_dict_config", "optim_state_dict_config"),
        not_needed("get_state_dict and save_model gather whole weights in rank 0's host memory"),
    ),
    "backward_prefetch": not_needed(_PREFETCH_REASON),
    "forward_prefetch": not_needed(_PREFETCH_REASON),
    "limit_all_gathers": not_needed("FSDP2 itself limits how many gathered parameters are held at a time"),
    "use_orig_params": not_needed("parameters always keep their names and groups"),
    "ignored_modules": not_needed("these modules are divided too, and compute the same"),
    "sync_module_states": not_needed("every rank always starts with rank 0's weights"),
    "cpu_ram_efficient_loading": not_needed("fsdp.weights loads shards into a model on the meta device"),
}
