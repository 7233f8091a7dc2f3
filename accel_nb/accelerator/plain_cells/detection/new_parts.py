"""Detection of layers and parameters that code adds to modules, possibly to a prepared model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)


class NewParts:
    """Records whether a layer or a parameter was added to any module."""

    def __init__(self) -> None:
        self.may_exist = True
        """Whether there may be new parts; the caller sets it to False when it has compared the models."""

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record while the block runs. Before it, the notebook may have changed models."""
        self.may_exist = True
        registers = register_module_module_registration_hook, register_module_parameter_registration_hook
        handles = [register(self._record) for register in registers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _record(self, module: nn.Module, name: str, part: Any) -> None:
        self.may_exist = True
