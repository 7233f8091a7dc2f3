"""The optimizer and schedule that DeepSpeed's configuration names, in place of placeholders; its values ``auto``."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from accel_nb.compat.deepspeed.config import DummyOptim, DummyScheduler
from accel_nb.compat.deepspeed.plugin import AUTO, DEFAULT_MAX_NORM, DeepSpeedPlugin
from accel_nb.compat.hf_utils import parse_flag_from_env
from accel_nb.compat.states import AcceleratorState
from accel_nb.errors import MisuseError

if TYPE_CHECKING:
    from accel_nb.compat.accelerator import Accelerator

_HIDDEN_SIZES = ("hidden_size", "hidden_sizes")
_SIZE_VALUES: Mapping[str, Callable[[int], int]] = MappingProxyType(
    {
        "zero_optimization.reduce_bucket_size": lambda size: size * size,
        "zero_optimization.stage3_prefetch_bucket_size": lambda size: int(0.9 * size * size),
        "zero_optimization.stage3_param_persistence_threshold": lambda size: 10 * size,
    }
)
"""Values ``auto`` that accelerate computes from the width of a model."""


def choose_plugin(plugin: Any, plugins: Any, precision: str) -> tuple[Any, dict[str, DeepSpeedPlugin]]:
    """Return the plugin of a new accelerator, which is selected, and all plugins by name, with the precision set.

    Without arguments they are the plugins of the previous accelerator, or the one in the launcher's variables.
    """
    if plugin is not None and plugins is not None:
        raise ValueError("deepspeed_plugin and deepspeed_plugins were both given: pass one of them")
    given = plugins if plugin is None else plugin
    if given is None and AcceleratorState._shared_state:
        given = vars(AcceleratorState()).get("deepspeed_plugins")
    if given is None and parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"):
        given = DeepSpeedPlugin()
    named: dict[str, Any] = given if isinstance(given, dict) else {} if given is None else {"": given}
    if not isinstance(given, dict) and not isinstance(given, DeepSpeedPlugin):
        return given, {}
    if not all(isinstance(item, DeepSpeedPlugin) for item in named.values()):
        kinds = ", ".join(sorted({type(item).__name__ for item in named.values()}))
        raise TypeError(f"each item of deepspeed_plugin is a DeepSpeedPlugin; got {kinds}")
    chosen = next((item for item in named.values() if item.selected), next(iter(named.values())))
    for item in named.values():
        item.set_mixed_precision(precision)
    chosen.select(_from_accelerator_state=True)
    return chosen, named


def steps_of_plugin(plugin: DeepSpeedPlugin, num_steps: int) -> int:
    """Return the micro-batches of a step: those of the configuration, if it has a number."""
    if plugin.num_steps in (None, num_steps):
        return num_steps
    if num_steps != 1:
        warnings.warn(
            f"gradient_accumulation_steps is {num_steps} in Accelerator(...) and {plugin.num_steps} in the DeepSpeed "
            "config: the latter is used",
            stacklevel=3,
        )
    return plugin.num_steps


def require_options(plugin: DeepSpeedPlugin, options: Mapping[str, Any] | None, objects: Iterable[Any]) -> None:
    """Raise `MisuseError` if options of a training differ from those with which the accelerator was built.

    Values ``auto`` that were filled since do not count as differences: they only affect speed.
    """
    if not any(isinstance(item, Optimizer | DummyOptim) for item in objects):
        return
    now, built = plugin.as_options(), options or {}
    changed = [f"{name} from {built[name]} to {now.get(name)}" for name in built if now.get(name) != built[name]]
    if changed:
        raise MisuseError(
            f"the DeepSpeed configuration has changed since this Accelerator was built: {', '.join(changed)}. Build "
            "an Accelerator() after the change, or after select_deepspeed_plugin, and prepare with that one"
        )


def without_placeholders(
    objects: Iterable[Any], accelerator: Accelerator, plugin: DeepSpeedPlugin
) -> tuple[tuple[Any, ...], list[LRScheduler]]:
    """Return objects with the optimizer and schedule that placeholders stand for, and the schedules among these."""
    found = list(objects)
    for item in found:
        if isinstance(item, nn.Module):
            _undo_partitioning(item)
    _check(found, plugin.deepspeed_config)
    _fill(found, accelerator, plugin)
    made = {
        item: _optimizer(item, plugin.deepspeed_config["optimizer"]) for item in found if isinstance(item, DummyOptim)
    }
    schedules: dict[DummyScheduler, LRScheduler] = {}
    for item in found:
        if isinstance(item, DummyScheduler):
            optimizer: Any = made.get(item.optimizer, item.optimizer)
            if isinstance(optimizer, DummyOptim):
                raise MisuseError("prepare the DummyOptim of this DummyScheduler in the same call")
            schedules[item] = _schedule(item, optimizer, plugin.deepspeed_config)
    replaced = {id(item): new for item, new in (*made.items(), *schedules.items())}
    return tuple(replaced.get(id(item), item) for item in found), list(schedules.values())


def _undo_partitioning(model: nn.Module) -> None:
    """Undo the partitioning of a model that was built under ``deepspeed.zero.Init``, as by transformers for stage 3.

    `Accelerator.prepare` shards it again, by its own options.
    """
    partitioned = [value for value in model.parameters() if "ds_tensor" in vars(value)]
    if not partitioned:
        return
    from deepspeed import zero  # pyright: ignore[reportMissingImports]

    with zero.GatheredParameters(partitioned):
        full_tensors = [value.data.clone() for value in partitioned]
    for value, data in zip(partitioned, full_tensors, strict=True):
        of_deepspeed = [
            name for name, item in vars(value).items() if name.startswith("ds_") or _is_deepspeed_object(item)
        ]
        for name in of_deepspeed:
            delattr(value, name)
        value.data = data


def _is_deepspeed_object(value: Any) -> bool:
    return str(getattr(value, "__module__", "")).partition(".")[0] == "deepspeed"


def _check(objects: Iterable[Any], config: Mapping[str, Any]) -> None:
    """Raise ValueError if objects contradict the configuration."""
    items = list(objects)
    has_optimizer = any(isinstance(item, Optimizer) for item in items)
    has_placeholder = any(isinstance(item, DummyOptim) for item in items)
    schedules = [item for item in items if isinstance(item, DummyScheduler)]
    has_scheduler = any(isinstance(item, LRScheduler) for item in items)
    if has_optimizer and "optimizer" in config:
        raise ValueError(
            "prepare() got an optimizer, and the DeepSpeed configuration has a section 'optimizer': remove the "
            "section, or pass accelerate.utils.DummyOptim(parameters) in place of the optimizer"
        )
    if has_placeholder and "optimizer" not in config:
        raise ValueError(
            "prepare() got a DummyOptim, and the DeepSpeed configuration has no section 'optimizer': add it, or pass "
            "an optimizer of torch.optim"
        )
    if has_scheduler and "scheduler" in config:
        raise ValueError(
            "prepare() got a scheduler, and the DeepSpeed configuration has a section 'scheduler': remove the section, "
            "or pass accelerate.utils.DummyScheduler(optimizer) in place of the scheduler"
        )
    if "scheduler" not in config and any(item.lr_scheduler_callable is None for item in schedules):
        raise ValueError(
            "prepare() got a DummyScheduler, and no scheduler is configured: add a section 'scheduler' to the "
            "DeepSpeed configuration, or give the DummyScheduler lr_scheduler_callable, a function that makes one"
        )
    if has_placeholder and has_scheduler:
        raise ValueError(
            "prepare() got a DummyOptim and a scheduler of another optimizer: pass accelerate.utils.DummyScheduler(the "
            "DummyOptim), or an optimizer of torch.optim with its scheduler"
        )


def _fill(objects: Iterable[Any], accelerator: Accelerator, plugin: DeepSpeedPlugin) -> None:
    """Replace the values ``auto`` of the configuration, which programs read, by those of the objects."""
    items = list(objects)
    sizes = [size for item in items if isinstance(size := getattr(item, "batch_size", None), int)]
    values: dict[str, Any] = {
        "gradient_clipping": DEFAULT_MAX_NORM,
        **dict.fromkeys(("train_micro_batch_size_per_gpu", "train_batch_size"), AUTO),
        "gradient_accumulation_steps": accelerator.gradient_accumulation_steps,
        "zero_optimization.stage3_gather_16bit_weights_on_model_save": False,
    }
    size = plugin.get_value("train_micro_batch_size_per_gpu")
    if sizes and size in (None, AUTO):
        size = min(sizes) if plugin.is_train_batch_min else max(sizes)
    if isinstance(size, int):
        values["train_micro_batch_size_per_gpu"] = size
        values["train_batch_size"] = size * accelerator.gradient_accumulation_steps * accelerator.num_processes
    model = next((item for item in items if isinstance(item, nn.Module)), None)
    if model is None:
        return
    plugin.set_moe_leaf_modules(model)
    values |= _values_by_hidden_size(model, plugin)
    for item in items:
        if isinstance(item, DummyOptim):
            values |= {"optimizer.params.lr": item.lr, "optimizer.params.weight_decay": item.weight_decay}
        elif isinstance(item, DummyScheduler) and item.lr_scheduler_callable is None:
            defaults = getattr(item.optimizer, "defaults", None)
            values |= {
                "scheduler.params.warmup_min_lr": 0,
                "scheduler.params.warmup_max_lr": defaults["lr"] if defaults else getattr(item.optimizer, "lr", None),
                "scheduler.params.warmup_num_steps": max(1, item.warmup_num_steps),
            }
            if item.total_num_steps is not None:
                shared = 1 if accelerator.split_batches else accelerator.num_processes
                values["scheduler.params.total_num_steps"] = math.ceil(item.total_num_steps / shared)
    plugin.deepspeed_config_process(must_match=False, **values)


def _values_by_hidden_size(model: nn.Module, plugin: DeepSpeedPlugin) -> dict[str, int]:
    """Return the values that depend on the width of a model; raise ValueError if it has none."""
    wanted = [name for name in _SIZE_VALUES if plugin.is_auto(name)]
    if not wanted:
        return {}
    config = getattr(model, "config", None)
    found = next((value for name in _HIDDEN_SIZES if (value := getattr(config, name, None)) is not None), None)
    if found is None:
        lacking = "config" if config is None else " and no ".join(f"config.{name}" for name in _HIDDEN_SIZES)
        raise ValueError(
            f"'auto' cannot be replaced in the DeepSpeed configuration for {', '.join(wanted)}: their values are "
            f"computed from the width of the model, and {type(model).__name__} has no {lacking}. Write whole numbers"
        )
    width = max(found) if isinstance(found, list | tuple) else found
    return {name: _SIZE_VALUES[name](width) for name in wanted}


def _optimizer(placeholder: DummyOptim, section: Mapping[str, Any]) -> Optimizer:
    """Return torch's optimizer for a section ``optimizer``."""
    name, values = str(section.get("type", "AdamW")), {**section.get("params", {})}
    is_decoupled = values.pop("adam_w_mode", True)
    for needless in ("torch_adam", "bias_correction", "fp32_optimizer_states"):
        values.pop(needless, None)
    kinds = {kind.lower(): getattr(torch.optim, kind) for kind in torch.optim.__all__}
    kind = kinds.get("adamw" if name.lower() == "adam" and is_decoupled else name.lower())
    if kind is None:
        raise ValueError(
            f"the optimizer {name} of the DeepSpeed config is not one of torch's: remove it there, and give prepare "
            "the optimizer itself"
        )
    unknown = sorted(set(values) - set(inspect.signature(kind).parameters))
    if unknown:
        raise ValueError(f"optimizer.params of the DeepSpeed config: {kind.__name__} has no {', '.join(unknown)}")
    return kind(placeholder.params, **values)


class _Schedule(LRScheduler):
    """A schedule of DeepSpeed's."""

    def __init__(self, optimizer: Optimizer, kind: Any, values: Mapping[str, Any]) -> None:
        self._inner = kind(optimizer, **values)
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        """Set the rates of the groups, and the momentum if the schedule has one; return the rates."""
        if self.last_epoch > 0:
            self._inner.step(self.last_epoch - 1)  # these count from the first step
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and the rates there."""
        return {name: value for name, value in super().state_dict().items() if name != "_inner"}


def _schedule(placeholder: DummyScheduler, optimizer: Optimizer, config: Mapping[str, Any]) -> LRScheduler:
    """Return the schedule that a placeholder stands for."""
    if placeholder.lr_scheduler_callable is not None:
        return placeholder.lr_scheduler_callable(optimizer)
    from deepspeed.runtime import lr_schedules  # pyright: ignore[reportMissingImports]

    section = config["scheduler"]
    kind = getattr(lr_schedules, str(section.get("type")), None)
    if section.get("type") not in lr_schedules.VALID_LR_SCHEDULES or kind is None:
        raise ValueError(f"the schedule {section.get('type')} of the DeepSpeed config is not one of DeepSpeed's")
    return _Schedule(optimizer, kind, section.get("params", {}))
