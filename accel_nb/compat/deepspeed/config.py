"""DeepSpeed's configuration as accelerate reads it, and placeholders for the optimizer and scheduler in it."""

from __future__ import annotations

import base64
import binascii
import copy
import json
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from accel_nb.accelerator.process_state import DistributedType


class HfDeepSpeedConfig:
    """A DeepSpeed configuration, whose values are read by names with dots."""

    def __init__(self, config_file_or_dict: Mapping[str, Any] | str | os.PathLike[str]) -> None:
        self.config: dict[str, Any] = _read(config_file_or_dict)
        self.set_stage_and_offload()

    def set_stage_and_offload(self) -> None:
        """Read the stage and the devices of offloading again, after a change of the configuration."""
        self._stage = self.get_value("zero_optimization.stage", -1)
        devices = [self.get_value(f"zero_optimization.offload_{part}.device") for part in ("optimizer", "param")]
        self._offload = self._stage in (2, 3) and any(device in ("cpu", "nvme") for device in devices)

    def find_config_node(self, ds_key_long: str) -> tuple[dict[str, Any] | None, str]:
        """Return the section that has a value, and the value's name in it; None if there is no such section."""
        *sections, name = ds_key_long.split(".")
        found: Any = self.config
        for section in sections:
            found = found.get(section)
            if found is None:
                break
        return found, name

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return a value, or the default."""
        section, name = self.find_config_node(ds_key_long)
        return default if section is None else section.get(name, default)

    def del_config_sub_tree(self, ds_key_long: str, must_exist: bool = False) -> None:
        """Remove a value or a section; raise ValueError if it must exist and does not."""
        section, name = self.find_config_node(ds_key_long)
        if section is not None and name in section:
            del section[name]
        elif must_exist:
            raise ValueError(f"{ds_key_long} is not in the DeepSpeed configuration {self.config}")

    def is_true(self, ds_key_long: str) -> bool:
        """Return whether a value is set and true."""
        return bool(self.get_value(ds_key_long))

    def is_false(self, ds_key_long: str) -> bool:
        """Return whether a value is set and false."""
        value = self.get_value(ds_key_long)
        return value is not None and not value

    def is_zero2(self) -> bool:
        """Return whether gradients are sharded, and parameters are not."""
        return self._stage == 2

    def is_zero3(self) -> bool:
        """Return whether parameters are sharded."""
        return self._stage == 3

    def is_offload(self) -> bool:
        """Return whether stage 2 or 3 keeps something in host memory or on disk."""
        return self._offload


def _read(given: Mapping[str, Any] | str | os.PathLike[str]) -> dict[str, Any]:
    if isinstance(given, Mapping):
        return copy.deepcopy(dict(given))
    if os.path.exists(given):
        with open(given, encoding="utf-8") as file:
            return json.load(file)
    text = os.fspath(given)
    try:
        try:
            return json.loads(text)
        except json.JSONDecodeError:
            return json.loads(base64.urlsafe_b64decode(text))
    except (binascii.Error, ValueError) as error:
        raise ValueError(
            f"the DeepSpeed configuration {text!r} is no existing file and no JSON: pass a dictionary, the path of a "
            "JSON file, or JSON text, plain or in base64"
        ) from error


class DummyOptim:
    """Placeholder for the optimizer of DeepSpeed's configuration, which `Accelerator.prepare` returns instead."""

    def __init__(self, params: Iterable[Any], lr: float = 0.001, weight_decay: float = 0, **kwargs: Any) -> None:
        self.params, self.lr, self.weight_decay, self.kwargs = params, lr, weight_decay, kwargs


class DummyScheduler:
    """Placeholder for the scheduler of DeepSpeed's configuration, or for the result of ``lr_scheduler_callable``."""

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Callable[[Any], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.optimizer, self.total_num_steps, self.warmup_num_steps = optimizer, total_num_steps, warmup_num_steps
        self.lr_scheduler_callable, self.kwargs = lr_scheduler_callable, kwargs


def get_active_deepspeed_plugin(state: Any) -> Any:
    """Return the selected plugin of a state; raise ValueError if DeepSpeed does not train."""
    if state.distributed_type != DistributedType.DEEPSPEED:
        raise ValueError(
            f"this state trains with {state.distributed_type}, so no DeepSpeed plugin is active: build "
            "Accelerator(deepspeed_plugin=...) first"
        )
    return state.deepspeed_plugin
