"""The FSDP plugin, with the names of `accelerate`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from enum import Enum
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import nn

from accel_nb.accelerator.options.kwargs_handler import KwargsHandler
from accel_nb.config.fsdp_import import fsdp_outcome
from accel_nb.config.import_report import NotImported
from accel_nb.config.message_text import quoted
from accel_nb.errors import ConfigError


@dataclass
class FullyShardedDataParallelPlugin(KwargsHandler):
    """Selects PyTorch's FSDP2 as the strategy.

    With one worker nothing is sharded: the options of FSDP have no effect, and a warning names them.

    Values may be members of torch's enumerations, or their names. "Ignored" fields accept any value, which has no
    effect with FSDP2.

    Args:
        fsdp_version: Ignored: it is always FSDP2.
        sharding_strategy: ``FULL_SHARD`` or ``SHARD_GRAD_OP``. For hybrid ones set ``fsdp.hybrid_shard_size`` instead.
        reshard_after_forward: Free gathered parameters between forward and backward.
        auto_wrap_policy: ``transformer_based_wrap``, ``size_based_wrap``, ``no_wrap``, or a `functools.partial` of
            torch's function for one of the first two. By default repeated blocks are wrapped.
        transformer_cls_names_to_wrap: Class names of the modules to wrap.
        min_num_params: How many parameters a module must have to be wrapped by size.
        cpu_offload: Whether to keep parameters, gradients and optimizer state in host memory: a boolean, or torch's
            policy of offloading, of FSDP or of FSDP2.
        activation_checkpointing: Recompute activations in the backward pass instead of storing them.
        mixed_precision_policy: The dtype in which the run computes, and that in which gradients are averaged: ``fp16``,
            ``bf16`` or ``fp32``, a dictionary with ``param_dtype`` and ``reduce_dtype``, or torch's policy, whose other
            values have no effect.
        param_init_fn: Not supported: use ``fsdp.weights``.
        state_dict_config: Ignored.
        optim_state_dict_config: Ignored.
        state_dict_type: Ignored.
        backward_prefetch: Ignored.
        forward_prefetch: Ignored.
        limit_all_gathers: Ignored.
        use_orig_params: Ignored.
        sync_module_states: Ignored.
        cpu_ram_efficient_loading: Ignored.
        ignored_modules: Ignored: these modules are divided too, with the same result.
    """

    fsdp_version: int | None = None
    sharding_strategy: str | int | Enum | None = None
    reshard_after_forward: bool | str | Enum | None = None
    auto_wrap_policy: str | Callable[..., Any] | None = None
    transformer_cls_names_to_wrap: Iterable[str] | str | None = None
    min_num_params: int | None = None
    cpu_offload: Any = None
    activation_checkpointing: bool | None = None
    mixed_precision_policy: Any = None
    ignored_modules: Any = None
    param_init_fn: Any = None
    state_dict_config: Any = None
    optim_state_dict_config: Any = None
    state_dict_type: Any = None
    backward_prefetch: Any = None
    forward_prefetch: Any = None
    limit_all_gathers: Any = None
    use_orig_params: Any = None
    sync_module_states: Any = None
    cpu_ram_efficient_loading: Any = None

    def as_options(self) -> dict[str, Any]:
        """Return the options that are given, by their names in the schema.

        Raises `ConfigError`, which lists all problems, for values without a corresponding option.
        """
        given = {
            item.name.removeprefix("fsdp_"): _plain(value)
            for item in fields(self)
            if (value := getattr(self, item.name)) is not None
        }
        given |= _wrap_fields(given.get("auto_wrap_policy"))
        if "cpu_offload" in given:
            given["cpu_offload"] = _is_offloading(given["cpu_offload"])
        options: dict[str, Any] = {"strategy": "fsdp"}
        problems: list[str] = []
        for name, value in given.items():
            if name == "mixed_precision_policy":
                outcome = _precision_options(value)
            else:
                outcome = NotImported(_REFUSED[name]) if name in _REFUSED else fsdp_outcome(name, value, given)
            if isinstance(outcome, NotImported):
                problems.append(f"{name} from FullyShardedDataParallelPlugin(...): {outcome.reason}")
            elif not isinstance(outcome, str):
                options |= outcome
        if problems:
            raise ConfigError(problems)
        return options


PRECISIONS: Mapping[Any, str] = MappingProxyType(
    {
        torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "no",
        "fp16": "fp16", "bf16": "bf16", "fp32": "no",
    }
)  # fmt: skip
"""Precisions by the dtypes of a policy, and by their names."""

_REFUSED = {
    "param_init_fn": "build the model on the meta device, and give fsdp.weights",
}


def _plain(value: Any) -> Any:
    return value.name if isinstance(value, Enum) else value


def _precision_options(policy: Any) -> dict[str, Any] | NotImported:
    """Return the options of a precision policy."""
    compute, reduce = (_precision_of(policy, name) for name in ("param_dtype", "reduce_dtype"))
    if compute not in (None, *PRECISIONS.values()):
        return NotImported(f"{quoted(str(compute))} is not one of fp16, bf16 and fp32; give mixed_precision")
    if reduce not in (None, "no", compute):
        return NotImported("gradients are averaged in the precision of the computation, or in float32")
    if compute in (None, "no"):
        return {} if compute is None else {"precision": compute}
    return {"precision": compute, "fsdp.reduce_dtype": "fp32" if reduce == "no" else "compute"}


def _precision_of(policy: Any, name: str) -> Any:
    """Return the precision that a policy has as its value ``name``; a dtype of no precision unchanged."""
    if isinstance(policy, Mapping):
        value = cast("Mapping[str, Any]", policy).get(name)
    else:
        value = policy if isinstance(policy, str) else getattr(policy, name, None)
    return PRECISIONS.get(value, value)


def _wrap_fields(policy: Any) -> dict[str, Any]:
    """Return the fields that correspond to a wrap policy given as a function; none for other values."""
    if not callable(policy):
        return {}
    known = cast(
        "functools.partial[Any]", policy if isinstance(policy, functools.partial) else functools.partial(policy)
    )
    name = getattr(known.func, "__name__", type(known.func).__name__)
    if name == "transformer_auto_wrap_policy":
        classes: Iterable[type[nn.Module]] = known.keywords.get("transformer_layer_cls", ())
        return {
            "auto_wrap_policy": "transformer_based_wrap",
            "transformer_cls_names_to_wrap": sorted(kind.__name__ for kind in classes),
        }
    if name == "size_based_auto_wrap_policy":
        smallest = known.keywords.get("min_num_params", 100_000_000)  # torch's own default
        return {"auto_wrap_policy": "size_based_wrap", "min_num_params": smallest}
    return {"auto_wrap_policy": f"the function {name}"}


def _is_offloading(value: Any) -> Any:
    """Return whether ``CPUOffload``, or a policy of FSDP2, enables offloading; any other value unchanged."""
    if type(value).__name__ in ("CPUOffloadPolicy", "OffloadPolicy"):
        return type(value).__name__ == "CPUOffloadPolicy"
    return getattr(value, "offload_params", value)
