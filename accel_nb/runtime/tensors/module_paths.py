"""Find the submodules, parameters and buffers of a module by path in its registries.

``Module.get_submodule`` reads attributes, and a method of the class hides a part that has its name (``self.half =
nn.Linear(...)``, ``self.parameters = nn.ParameterList(...)``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn


def submodule_at(module: nn.Module, path: str) -> nn.Module:
    """Return the submodule that ``named_modules`` lists under a path; raise KeyError if there is none."""
    for name in path.split(".") if path else ():
        found = module._modules[name]
        if found is None:
            raise KeyError(path)
        module = found
    return module


def parameter_at(module: nn.Module, path: str) -> nn.Parameter:
    """Return the parameter that ``named_parameters`` lists under a path; raise KeyError if there is none."""
    owner, _, name = path.rpartition(".")
    found = submodule_at(module, owner)._parameters[name]
    if found is None:
        raise KeyError(path)
    return found


def buffer_at(module: nn.Module, path: str) -> torch.Tensor:
    """Return the buffer that ``named_buffers`` lists under a path; raise KeyError if there is none."""
    owner, _, name = path.rpartition(".")
    found = submodule_at(module, owner)._buffers[name]
    if found is None:
        raise KeyError(path)
    return found
