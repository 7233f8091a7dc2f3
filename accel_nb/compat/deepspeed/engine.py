"""The engine that `Accelerator.prepare` returns for a model under DeepSpeed."""

from __future__ import annotations

import math
import os
from glob import escape, glob
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from accel_nb.runtime.process.serialization import decode, encode

if TYPE_CHECKING:
    from accel_nb.compat.accelerator import Accelerator

_CLIENT_STATE = "client_state.bin"
"""The file of a checkpoint with the values that the program has passed."""


class DeepSpeedEngine(nn.Module):
    """A prepared model with the methods of DeepSpeed's engine that programs call; its attributes are the model's."""

    module: nn.Module

    def __init__(self, model: nn.Module, accelerator: Accelerator, config: dict[str, Any]) -> None:
        super().__init__()
        self.module = model
        vars(self).update(_accelerator=accelerator, config=config, training=model.training)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the model."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        return self.module(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the weights under the model's own names."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load weights under the model's own names."""
        return self.module.load_state_dict(*args, **kwargs)

    def get_global_grad_norm(self) -> float:
        """Return the norm of all gradients; every rank must call."""
        return float(self._accelerator._stepper.clip_norm(self.module.parameters(), math.inf, 2.0))

    def save_checkpoint(
        self, save_dir: str | os.PathLike[str], tag: Any = None, client_state: Any = None, **options: Any
    ) -> bool:
        """Save the state of the training to the folder ``tag`` of ``save_dir``, by default ``global_stepN``.

        ``client_state`` has values of the program that `serialization.encode` accepts. Every rank must call.
        """
        name = f"global_step{self._accelerator._stepper.num_steps}" if tag is None else str(tag)
        content = encode(client_state or {})

        def write(models: Any, weights: Any, folder: str) -> None:
            if self._accelerator.is_main_process:
                Path(folder, _CLIENT_STATE).write_bytes(content)

        hook = self._accelerator.register_save_state_pre_hook(write)
        try:
            self._accelerator.components.state.save(os.path.join(save_dir, name), blocking=True)
        finally:
            hook.remove()
        return True

    def load_checkpoint(
        self, load_dir: str | os.PathLike[str], tag: Any = None, **options: Any
    ) -> tuple[str | None, Any]:
        """Load what `save_checkpoint` has saved, by default the newest; return its folder and ``client_state``.

        Return None for both if there is no checkpoint.
        """
        name = "*" if tag is None else escape(str(tag))
        found = glob(os.path.join(escape(os.fspath(load_dir)), name, _CLIENT_STATE))
        if not found:
            return None, None
        newest = max(found, key=os.path.getmtime)
        folder = os.path.dirname(newest)
        self._accelerator.load_state(folder)
        return folder, decode(Path(newest).read_bytes())

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor]:
        """Return the whole weights; every rank must call."""
        found = self._accelerator.get_state_dict(self.module)
        frozen = {name for name, value in self.module.named_parameters() if not value.requires_grad}
        return {key: value for key, value in found.items() if not (exclude_frozen_parameters and key in frozen)}


def model_of(item: Any) -> Any:
    """Return the model of an engine; other objects unchanged."""
    return item.module if isinstance(item, DeepSpeedEngine) else item
