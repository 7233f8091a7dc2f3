"""The choice of modules of experts that are divided, and the trial that it makes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel_nb.strategies.base import Refusal
from accel_nb.strategies.expert_parallel import expert_plan
from accel_nb.strategies.expert_parallel.expert_plan import plan_experts


class Experts(nn.Module):
    """Experts of one matrix each; ``mix`` is computed of all tokens before."""

    def __init__(self, num_experts: int = 4, mix: Any = torch.tanh) -> None:
        super().__init__()
        self.num_experts, self.mix = num_experts, mix
        self.matrices = nn.Parameter(torch.randn(num_experts, 3, 3))

    def forward(self, tokens: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        mixed = self.mix(tokens)
        chosen = torch.einsum("td,tkde->tke", mixed, self.matrices[indices])
        return (chosen * weights[..., None]).sum(1)


class Gained(Experts):
    """Experts with a factor for each one in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("gains", torch.ones(self.num_experts))

    def forward(self, tokens: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        return super().forward(tokens, indices, weights * self.get_buffer("gains")[indices])


class Dropping(Experts):
    """Experts with dropout."""

    def forward(self, tokens: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(tokens, 0.5, self.training), indices, weights)


def test_modules_with_other_functions_are_tried_apart() -> None:
    assert plan_experts(nn.Sequential(Experts(), Experts(mix=lambda x: x - x.mean(0)), Experts()), 2) == ["0", "2"]


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        (Gained(), "Gained: it has buffers, which are not divided"),
        (Dropping().eval(), "Dropping: it draws random numbers"),
    ],
)
def test_what_differs_in_later_steps_is_refused(model: nn.Module, problem: str) -> None:
    refused = plan_experts(nn.Sequential(model), 2)
    assert isinstance(refused, Refusal)
    assert problem in str(refused)


def test_a_trial_calls_no_hooks_and_copies_few_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = Experts(64)
    called: list[Any] = []
    experts.register_forward_hook(lambda *_: called.append(1))
    copied: list[int] = []
    run = expert_plan._run
    monkeypatch.setattr(
        expert_plan, "_run", lambda module, *given: copied.append(len(module.matrices)) or run(module, *given)
    )
    assert plan_experts(nn.Sequential(experts), 2) == ["0"]
    assert not called
    assert max(copied) == 4
