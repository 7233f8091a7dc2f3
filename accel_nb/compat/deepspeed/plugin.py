"""The DeepSpeed plugin with accelerate's fields, defaults and methods; it becomes options of accel_nb's schema."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import nn

from accel_nb.accelerator.options import plugins
from accel_nb.compat.deepspeed.config import HfDeepSpeedConfig
from accel_nb.compat.models.model_parts import get_module_class_from_name
from accel_nb.errors import MisuseError
from accel_nb.runtime.process.environment import get_variable

AUTO = "auto"
DEFAULT_MAX_NORM = 1.0
"""The norm to which gradients are clipped under DeepSpeed if none is given, as in accelerate."""

_ZERO = "zero_optimization"
_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "gradient_accumulation_steps": "gradient_accumulation_steps",
        "gradient_clipping": "gradient_clipping",
        "zero_stage": f"{_ZERO}.stage",
        "offload_optimizer_device": f"{_ZERO}.offload_optimizer.device",
        "offload_param_device": f"{_ZERO}.offload_param.device",
        "offload_param_nvme_path": f"{_ZERO}.offload_param.nvme_path",
        "offload_optimizer_nvme_path": f"{_ZERO}.offload_optimizer.nvme_path",
        "zero3_save_16bit_model": f"{_ZERO}.stage3_gather_16bit_weights_on_model_save",
    }
)
"""Fields by the name of their value in the configuration."""

_VARIABLES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "gradient_accumulation_steps": ("GRADIENT_ACCUMULATION_STEPS", AUTO),
        "gradient_clipping": ("GRADIENT_CLIPPING", AUTO),
        "zero_stage": ("DEEPSPEED_ZERO_STAGE", "2"),
        "offload_optimizer_device": ("DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "none"),
        "offload_param_device": ("DEEPSPEED_OFFLOAD_PARAM_DEVICE", "none"),
        "offload_optimizer_nvme_path": ("DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH", "none"),
        "offload_param_nvme_path": ("DEEPSPEED_OFFLOAD_PARAM_NVME_PATH", "none"),
        "zero3_save_16bit_model": ("DEEPSPEED_ZERO3_SAVE_16BIT_MODEL", "false"),
    }
)
"""For each field the variable, after ``ACCELERATE_``, of a value that is not given, and its default."""

_SECTIONS_WITHOUT_OPTIONS = ("optimizer", "scheduler", "msamp")
"""Sections of the configuration that correspond to no option: `prepare` reads them, or they have no effect."""


@dataclass
class DeepSpeedPlugin:
    """Selects DeepSpeed's ZeRO; models are always built whole, and divided after that."""

    hf_ds_config: Any = None
    gradient_accumulation_steps: Any = None
    gradient_clipping: Any = None
    zero_stage: Any = None
    is_train_batch_min: bool = True
    offload_optimizer_device: str | None = None
    offload_param_device: str | None = None
    offload_optimizer_nvme_path: str | None = None
    offload_param_nvme_path: str | None = None
    zero3_init_flag: bool | None = None
    zero3_save_16bit_model: bool | None = None
    transformer_moe_cls_names: str | None = None
    enable_msamp: bool | None = None
    msamp_opt_level: Any = None

    def __post_init__(self) -> None:
        given = self.hf_ds_config
        if given is None:
            given = get_variable("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
        has_config = not (isinstance(given, str) and given == "none")
        arguments = {name for name in _NAMES if getattr(self, name) is not None}
        for name, (variable, default) in _VARIABLES.items():
            if name not in arguments:
                setattr(self, name, _value(get_variable(f"ACCELERATE_{variable}", default)))
        self.msamp_opt_level, self.enable_msamp = self.msamp_opt_level or "O1", bool(self.enable_msamp)
        if self.enable_msamp:
            raise MisuseError(
                "enable_msamp of DeepSpeedPlugin: MS-AMP is not supported; mixed_precision='fp8' is torchao's"
            )
        if has_config:
            self.hf_ds_config = given if isinstance(given, HfDeepSpeedConfig) else HfDeepSpeedConfig(given)
            self._join(arguments)
        else:
            self.hf_ds_config = HfDeepSpeedConfig(self._config_of_fields())
        self.deepspeed_config: dict[str, Any] = self.hf_ds_config.config
        self.deepspeed_config["steps_per_print"] = float("inf")
        self.dschf: Any = None
        self._selected = False
        is_wanted = self.zero3_init_flag
        if is_wanted is None:
            is_wanted = _value(get_variable("ACCELERATE_DEEPSPEED_ZERO3_INIT", str(self.hf_ds_config.is_zero3())))
        elif is_wanted and not self.hf_ds_config.is_zero3():
            warnings.warn("zero3_init_flag is for ZeRO stage 3 only, and is set to False", stacklevel=3)
        self.zero3_init_flag = bool(is_wanted) and self.hf_ds_config.is_zero3()

    def _join(self, arguments: set[str]) -> None:
        """Fill the configuration from the fields, where it has ``auto``, and the fields from the configuration."""
        config = self.hf_ds_config.config
        config.setdefault("gradient_accumulation_steps", 1)
        if _ZERO not in config:
            raise ValueError(
                f"the DeepSpeed configuration has no section {_ZERO!r}: add it, at least "
                f'"{_ZERO}": {{"stage": 0, 1, 2 or 3}}'
            )
        for name, key in _NAMES.items():
            found = self.get_value(key)
            if name in arguments and found not in (None, AUTO, getattr(self, name)):
                warnings.warn(
                    f"{name}={getattr(self, name)!r} of DeepSpeedPlugin has no effect: {key} is {found!r} in the "
                    "configuration",
                    stacklevel=4,
                )
            self.fill_match(key, must_match=False, **{key: getattr(self, name)})
        self.hf_ds_config.set_stage_and_offload()
        for name, key in _NAMES.items():
            if (found := self.get_value(key)) not in (None, AUTO):
                setattr(self, name, found)

    def _config_of_fields(self) -> dict[str, Any]:
        """Return the configuration of the fields."""
        sections: dict[str, Any] = {
            f"offload_{part}": {
                "device": device,
                "nvme_path": getattr(self, f"offload_{part}_nvme_path") if device == "nvme" else None,
            }
            for part, device in (("optimizer", self.offload_optimizer_device), ("param", self.offload_param_device))
        }
        gathers = {"stage3_gather_16bit_weights_on_model_save": self.zero3_save_16bit_model}
        config: dict[str, Any] = {
            "train_batch_size": AUTO,
            "train_micro_batch_size_per_gpu": AUTO,
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
            _ZERO: {"stage": self.zero_stage, **sections, **gathers},
        }
        if self.gradient_clipping:
            config["gradient_clipping"] = self.gradient_clipping
        return config

    def as_options(self) -> dict[str, Any]:
        """Return the options that correspond to the configuration, by their names in the schema."""
        config = {name: value for name, value in self.deepspeed_config.items() if name not in _SECTIONS_WITHOUT_OPTIONS}
        if config.get("gradient_clipping") == AUTO:
            config["gradient_clipping"] = DEFAULT_MAX_NORM
        config["gradient_accumulation_steps"] = AUTO  # `Accelerator` has decided, by `num_steps`
        options = plugins.DeepSpeedPlugin(hf_ds_config=config).as_options()
        return {key: value for key, value in options.items() if key != "strategy" or self.zero_stage}

    @property
    def num_steps(self) -> int | None:
        """The micro-batches of a step that the configuration has; None if the accelerator decides."""
        found = self.get_value("gradient_accumulation_steps")
        return None if found in (None, AUTO) else int(found)

    def fill_match(
        self, ds_key_long: str, mismatches: list[str] | None = None, must_match: bool = True, **kwargs: Any
    ) -> None:
        """Replace a value ``auto`` by that of ``kwargs``, or add a line to ``mismatches`` if the two differ."""
        section, name = self.hf_ds_config.find_config_node(ds_key_long)
        if section is None:
            return
        if section.get(name) == AUTO:
            if ds_key_long not in kwargs:
                raise ValueError(
                    f"{ds_key_long} of the DeepSpeed configuration is 'auto', and there is no value for it: set it "
                    "there, or pass it by this name"
                )
            section[name] = kwargs[ds_key_long]
        elif must_match and section.get(name) is not None and section[name] != kwargs.get(ds_key_long, section[name]):
            line = f"{ds_key_long} is {section[name]!r} in the configuration and {kwargs[ds_key_long]!r} in the code"
            (mismatches if mismatches is not None else []).append(line)

    def is_auto(self, ds_key_long: str) -> bool:
        """Return whether a value of the configuration is ``auto``."""
        return self.get_value(ds_key_long) == AUTO

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return a value of the configuration by its name with dots, or the default."""
        return self.hf_ds_config.get_value(ds_key_long, default)

    def deepspeed_config_process(
        self,
        prefix: str = "",
        mismatches: list[str] | None = None,
        config: dict[str, Any] | None = None,
        must_match: bool = True,
        **kwargs: Any,
    ) -> None:
        """Fill all values ``auto`` from ``kwargs``; raise ValueError for values that differ if they must match."""
        mismatches = [] if mismatches is None else mismatches
        for name, value in (self.deepspeed_config if config is None else config).items():
            if isinstance(value, dict):
                self.deepspeed_config_process(f"{prefix}{name}.", mismatches, value, must_match, **kwargs)
            else:
                self.fill_match(f"{prefix}{name}", mismatches, must_match, **kwargs)
        if mismatches and not prefix:
            raise ValueError(
                f"values of the DeepSpeed configuration differ from those of the code: {'; '.join(mismatches)}. Make "
                'them equal, or write "auto" in the configuration, which means the value of the code'
            )

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Set the number format of the configuration; raise ValueError if it has another one."""
        wanted = {"fp16": mixed_precision == "fp16", "bf16": mixed_precision in ("bf16", "fp8")}
        for name, is_on in wanted.items():
            section = self.deepspeed_config.setdefault(name, {"enabled": is_on})
            if not is_on and mixed_precision != "no" and str(section.get("enabled")).lower() == "true":
                raise ValueError(
                    f"mixed_precision={mixed_precision!r}, and the DeepSpeed configuration enables {name}: remove "
                    f"{name} there, or set mixed_precision={name!r}"
                )
            self.fill_match(f"{name}.enabled", None, False, **{f"{name}.enabled": is_on})

    def set_deepspeed_weakref(self) -> None:
        """Pass the configuration to transformers, which reads the stage from it."""
        from accel_nb.compat.names.availability import is_transformers_available

        if not is_transformers_available():
            return
        from transformers.integrations import deepspeed as theirs  # pyright: ignore[reportMissingImports]

        config = copy.deepcopy(self.deepspeed_config)
        for name in ("gradient_accumulation_steps", "train_micro_batch_size_per_gpu"):
            if config.get(name, AUTO) == AUTO:
                config[name] = 1
        if config.get("train_batch_size") == AUTO:
            del config["train_batch_size"]
        theirs.unset_hf_deepspeed_config()
        self.dschf = theirs.HfDeepSpeedConfig(config)  # transformers keeps a weak reference

    def is_zero3_init_enabled(self) -> bool:
        """Return False: models are not divided while they are built."""
        return False

    def zero3_init_context_manager(self, enable: bool = False) -> AbstractContextManager[None]:
        """Return a context without an effect, in which scripts build models that are not trained."""
        return nullcontext()

    def set_moe_leaf_modules(self, model: nn.Module) -> None:
        """Set which blocks of experts stage 3 gathers whole."""
        names = self.transformer_moe_cls_names or get_variable("ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES", "")
        self.transformer_moe_cls_names = names or None
        if not names:
            return
        kinds: list[Any] = []
        for name in names.split(","):
            kinds.append(get_module_class_from_name(model, name.strip()))
            if kinds[-1] is None:
                raise ValueError(
                    f"transformer_moe_cls_names has {name.strip()!r}, and no module of {type(model).__name__} is of a "
                    "class of that name"
                )
        from deepspeed.utils import set_z3_leaf_modules  # pyright: ignore[reportMissingImports]

        set_z3_leaf_modules(model, kinds)

    @property
    def selected(self) -> bool:
        """Whether this is the plugin of the accelerators that are built next."""
        return self._selected

    @selected.setter
    def selected(self, value: bool) -> None:
        raise NotImplementedError("a plugin is selected by AcceleratorState().select_deepspeed_plugin(name)")

    def select(self, _from_accelerator_state: bool = False) -> None:
        """Select this plugin; `AcceleratorState.select_deepspeed_plugin` calls it."""
        if not _from_accelerator_state:
            raise ValueError("a plugin is selected by AcceleratorState().select_deepspeed_plugin(name)")
        self.set_deepspeed_weakref()
        self._selected = True

    def _unselect(self) -> None:
        self._selected = False


def _value(text: str) -> Any:
    """Return the value of a variable."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        number = float(text)
    except ValueError:
        return text
    return int(number) if number.is_integer() and "." not in text else number
