"""Writing into tensors of which several elements are one place in memory."""

from __future__ import annotations

import torch
from torch import nn

from accel_nb.pool.sync.change_detection import module_state, set_module_state
from accel_nb.pool.sync.contents.content_kinds import content_of, set_content
from accel_nb.runtime.tensors.overlap import overwrite


def test_a_tensor_with_repeated_dims_is_overwritten_in_place() -> None:
    base = torch.zeros(1, 3)
    for target in (base.expand(4, 3), base[0], base.expand(2, 1, 3).transpose(1, 2), torch.zeros(3, 2).t()):
        source = (torch.arange(3.0) + 1).expand(4, 3) if target.shape == (4, 3) else torch.full(target.shape, 7.0)
        assert overwrite(target, source) is target
        assert torch.equal(target, source)


def test_modules_and_tensors_with_repeated_memory_are_filled() -> None:
    modules = [nn.Linear(2, 2) for _ in range(2)]
    for value, module in enumerate(modules):
        module.register_buffer("table", torch.full((1, 2), float(value)).expand(3, 2))
    set_module_state(modules[0], module_state(modules[1]))
    assert torch.equal(modules[0].table, torch.ones(3, 2))
    assert modules[0].table.stride() == (0, 1)
    tensor, other = torch.zeros(1).expand(3), torch.ones(1).expand(3)
    content = content_of(other)
    assert content is not None
    set_content(tensor, content[1])
    assert tensor.tolist() == [1, 1, 1]
