"""A report on the configuration that accel_nb passes to DeepSpeed: its JSON, and the origin of each value.

The reverse of `deepspeed_import`. Neither module imports DeepSpeed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from accel_nb.config.deepspeed_settings import settings_for
from accel_nb.config.layers import Resolved
from accel_nb.config.message_text import quoted
from accel_nb.errors import ConfigError


@dataclass(frozen=True, slots=True)
class DeepspeedReport:
    """DeepSpeed's configuration, and a line for each of its values and each option that is not passed to DeepSpeed."""

    settings: Mapping[str, Any]
    table: str

    @property
    def json(self) -> str:
        """The configuration as the text of DeepSpeed's JSON file."""
        return json.dumps(self.settings, indent=2) + "\n"


def show_deepspeed(resolved: Resolved, *, on_gpus: bool) -> DeepspeedReport:
    """Return DeepSpeed's settings for a model of any size; raises `ConfigError` if another strategy is set."""
    config = resolved.config
    if config.strategy not in ("auto", "deepspeed"):
        raise ConfigError(
            f"strategy is {config.strategy} from {resolved.origins['strategy']}, so DeepSpeed is not used; "
            "give --strategy deepspeed, or do not set the strategy"
        )
    settings = settings_for(config.deepspeed, None, pins_memory=on_gpus)
    given = {row.option: row for row in resolved.explain()}
    rows: list[tuple[str, str, str, str]] = []
    for name, value in _flatten(settings):
        source = _SOURCES[name]
        if isinstance(source, _Option):
            row = given[source.name]
            text = f"{row.option}: {quoted(row.value)} ({row.origin}){source.more}"
        else:
            text = source
        rows.append((name, quoted(value), "<-" if isinstance(source, _Option) else "ok", text))
    rows += [
        (option, quoted(row.value), "not passed", f"{reason} ({row.origin})")
        for option, reason in _NOT_PASSED.items()
        if (row := given[option]).origin.layer != "default"
    ]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1, 2)]
    lines = [
        "  ".join([*(f"{part:<{width}}" for part, width in zip(row, widths, strict=False)), row[3]]) for row in rows
    ]
    return DeepspeedReport(settings, "\n".join([*lines, *resolved.notes]) + "\n")


def _flatten(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flatten(cast("Mapping[str, Any]", value), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


@dataclass(frozen=True, slots=True)
class _Option:
    """The option that determines a value; ``more`` is added to its line."""

    name: str
    more: str = ""


_ZERO = "zero_optimization"
_UP_TO_MODEL = ", at most the model's size"
_SOURCES: Mapping[str, _Option | str] = {
    "train_micro_batch_size_per_gpu": "no effect: the loader determines it",
    "gradient_accumulation_steps": "accel_nb accumulates gradients outside of the engine",
    "gradient_clipping": "accel_nb clips gradients outside of the engine",
    "zero_allow_untested_optimizer": "accel_nb checks optimizers before, see deepspeed.allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer": "PyTorch's own optimizers are used, so no operator is compiled",
    f"{_ZERO}.stage": _Option("deepspeed.zero_stage"),
    f"{_ZERO}.contiguous_gradients": "always on",
    f"{_ZERO}.overlap_comm": _Option("deepspeed.overlap_comm"),
    f"{_ZERO}.reduce_scatter": "always on",
    f"{_ZERO}.reduce_bucket_size": _Option("deepspeed.bucket_size", _UP_TO_MODEL),
    f"{_ZERO}.allgather_bucket_size": _Option("deepspeed.bucket_size", _UP_TO_MODEL),
    f"{_ZERO}.compute_grad_norm": "accel_nb computes norms outside of the engine, on request",
    f"{_ZERO}.offload_optimizer.device": _Option("deepspeed.offload_optimizer"),
    f"{_ZERO}.offload_optimizer.pin_memory": "on if there are GPUs",
    f"{_ZERO}.stage3_prefetch_bucket_size": _Option("deepspeed.prefetch_size", _UP_TO_MODEL),
    f"{_ZERO}.stage3_param_persistence_threshold": _Option("deepspeed.persistent_size"),
    f"{_ZERO}.offload_param.device": _Option("deepspeed.offload_parameters"),
    f"{_ZERO}.offload_param.pin_memory": "on if there are GPUs",
}
"""The origin of each value: an option, or the reason for a fixed value."""

_NOT_PASSED: Mapping[str, str] = {
    "accumulate": "accel_nb accumulates gradients outside of the engine, as under every strategy",
    "clip": "accel_nb clips this rank's gradients outside of the engine",
    "precision": "weights stay float32, and the model computes under autocast",
}
"""Options with a counterpart in DeepSpeed that accel_nb implements itself, and the reason."""
