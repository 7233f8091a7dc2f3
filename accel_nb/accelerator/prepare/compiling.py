"""torch.compile for prepared models: each repeated block, or the model as a whole."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from accel_nb.config.sections import CompileOptions
from accel_nb.errors import ConfigError
from accel_nb.runtime.devices.registry import device_type
from accel_nb.runtime.process.hardware import missing_compiler
from accel_nb.runtime.tensors.instance_patching import replace_forward, restore_forward
from accel_nb.strategies.fsdp.wrap_policy import repeated_blocks

_DYNAMIC = {"auto": None, "yes": True, "no": False}


class Compiler:
    """Compiles models in place before a strategy wraps them, and restores them after the strategy unwraps them."""

    def __init__(self, options: CompileOptions) -> None:
        self._is_on = options.backend != "no"
        self._is_regional = options.regional
        self._settings: dict[str, Any] = {
            "backend": options.backend,
            "fullgraph": options.fullgraph,
            "dynamic": _DYNAMIC[options.dynamic],
        }
        if options.mode != "default":
            self._settings["mode"] = options.mode
        # By model: its compiled blocks, with their own compiled calls from before. A model may be freed while it is
        # compiled, if it was prepared for evaluation.
        self._compiled: MutableMapping[nn.Module, list[tuple[nn.Module, Any]]] = WeakIdKeyDictionary()

    def compile(self, model: nn.Module) -> None:
        """Compile a model's repeated blocks, or the model as a whole if there are none or ``regional`` is off."""
        if not self._is_on or model in self._compiled:
            return
        blocks = list(repeated_blocks(model).values()) if self._is_regional else []
        self._compiled[model] = [(block, block._compiled_call_impl) for block in blocks]
        for block in blocks:
            block.compile(**self._settings)
        if not blocks:
            replace_forward(model, torch.compile(current_forward(model), **self._settings))

    def compile_function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function compiled with the same options as models; unchanged if compiling is off."""
        return torch.compile(function, **self._settings) if self._is_on else function

    def undo(self, model: nn.Module) -> None:
        """Restore a model's uncompiled code; do nothing if it is not compiled."""
        blocks = self._compiled.pop(model, None)
        if blocks is None:
            return
        for block, before in blocks:
            block._compiled_call_impl = before
        if not blocks:
            restore_forward(model)

    def has_compiled_whole(self, model: nn.Module) -> bool:
        """Return whether the model is compiled as a whole."""
        return self._compiled.get(model) == []

    def has_compiled_any(self, model: nn.Module) -> bool:
        """Return whether the model or any of its blocks are compiled."""
        return model in self._compiled

    def has_compiled_blocks(self, model: nn.Module) -> bool:
        """Return whether blocks of the model are compiled."""
        return bool(self._compiled.get(model))

    def describe(self, model: nn.Module) -> str | None:
        """Return a short text about which parts of a model are compiled; None if none are."""
        blocks = self._compiled.get(model)
        if blocks is None:
            return None
        what = f"{len(blocks)} blocks" if blocks else "as a whole"
        return f"{type(model).__name__} is compiled by {self._settings['backend']}, {what}"


def require_cpp_compiler(options: CompileOptions, device: torch.device) -> None:
    """Raise `ConfigError` if models are to be compiled for the CPU and no C++ compiler is installed."""
    if options.backend == "inductor" and device_type(device).is_host and (name := missing_compiler()) is not None:
        raise ConfigError(
            f"compile.backend is inductor, which needs a C++ compiler, and {name} is not installed: install it, set "
            "the variable CXX to another one, or leave compile.backend out"
        )


def current_forward(model: nn.Module) -> Any:
    """Return the ``forward`` that runs when a module is called: the instance's attribute, or the class's method."""
    own = vars(model).get("forward")
    return own if own is not None else type(model).forward.__get__(model)
