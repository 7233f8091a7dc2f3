"""What kind of torch object a value is, told without importing torch."""

from __future__ import annotations

import sys
from typing import Any


def is_module(value: Any) -> bool:
    """Whether the value is a torch module."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def is_tensor(value: Any) -> bool:
    """Whether the value is a torch tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_optimizer(value: Any) -> bool:
    """Whether the value is a torch optimizer."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.optim.Optimizer)


def is_scheduler(value: Any) -> bool:
    """Whether the value is a torch learning-rate scheduler."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.optim.lr_scheduler.LRScheduler)


def trained_kinds() -> tuple[type, ...]:
    """Return the classes of modules, optimizers and schedulers: each is brought up to date in a way of its own."""
    torch = sys.modules.get("torch")
    return () if torch is None else (torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)


def is_trained(value: Any) -> bool:
    """Whether the value is a module, an optimizer or a scheduler."""
    return isinstance(value, trained_kinds())


def is_loader(value: Any) -> bool:
    """Whether the value is a torch data loader."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.utils.data.DataLoader)
