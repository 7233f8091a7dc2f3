"""Choice of the modules of experts that are divided, after a trial: one for all equal modules.

In the trial a copy of the module with a few of its experts is run on random tokens on the CPU, in float64 or else in
float32, whole and in parts, with threads in place of ranks. So it needs no other rank, changes nothing, and
cannot leave a rank waiting.
"""

from __future__ import annotations

import copy
import io
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from typing import Any

import torch
from torch import Tensor, nn

from accel_nb.runtime import rng
from accel_nb.runtime.distributed.token_exchange import TokenExchange
from accel_nb.runtime.tensors.instance_patching import innermost_class
from accel_nb.runtime.tensors.module_paths import parameter_at
from accel_nb.strategies.base import Refusal
from accel_nb.strategies.block_calls import CallHooks, inside
from accel_nb.strategies.expert_parallel.divided_experts import ExpertDivision
from accel_nb.strategies.module_kinds import kind_of
from accel_nb.strategies.trials import ThreadCommunicator, TrialFailed, is_close, random_copy, run_threads

_NUM_TOKENS, _NUM_CHOSEN = 7, 2
_PER_PART = 2
"""The number of experts of a part in a trial: more would take the memory of all weights of a layer."""
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}


def plan_experts(model: nn.Module, size: int) -> list[str] | Refusal:
    """Return the names of the modules of experts to divide among ``size`` ranks, or the reason if there are none."""
    found = {name: part for name, part in model.named_modules() if _has_experts(part)}
    kind = innermost_class(model).__name__
    num_names = Counter(id(value) for _, value in model.named_parameters(remove_duplicate=False))
    problems: dict[str, str] = {}
    chosen: list[str] = []
    problem_by_kind: dict[Any, str | None] = {}
    for name, module in found.items():
        experts: Any = module
        if experts.num_experts % size:
            degrees = [str(degree) for degree in range(1, experts.num_experts + 1) if experts.num_experts % degree == 0]
            return Refusal(
                f"{name} of the {kind} has {experts.num_experts} experts, which mesh.ep {size} does not divide",
                f"use mesh.ep {', '.join(degrees)}",
            )
        problem = _static_problem(module, num_names)
        if problem is None:
            key = kind_of(module)
            if key not in problem_by_kind:
                problem_by_kind[key] = _trial_problem(module, size)
            problem = problem_by_kind[key]
        if problem is None:
            chosen.append(name)
        else:
            problems[innermost_class(module).__name__] = problem
    if chosen:
        return chosen
    reasons = "; ".join(f"{name}: {why}" for name, why in problems.items()) or "no module has num_experts"
    return Refusal(
        f"the {kind} has no experts that mesh.ep {size} can divide ({reasons})",
        "train with --ep 1, or compute the experts in a module with num_experts, parameters of shape "
        "[num_experts, ...] and forward(tokens [T, D], indices [T, K], weights [T, K])",
    )


def _static_problem(module: nn.Module, num_names: Mapping[int, int]) -> str | None:
    """Return the reason if a module cannot be divided, as far as it is known without a trial.

    ``num_names`` has, by id, under how many names the model has a parameter.
    """
    if any(num_names[id(value)] > 1 for value in module.parameters()):
        return "its weights are tied to others"
    if any(True for _ in module.buffers()):
        return "it has buffers, which are not divided"
    if CallHooks(inside(module), includes_library_hooks=True).exist():
        return "hooks inside of it read or change its values"
    return None


def _has_experts(module: nn.Module) -> bool:
    """Return whether a module has stacked weights of experts, and nothing else."""
    number = vars(module).get("num_experts")
    own = list(module.parameters(recurse=False))
    return (
        type(number) is int
        and number > 1
        and bool(own)
        and all(value.dim() > 0 and len(value) == number for value in own)
        and not any(True for child in module.children() for _ in child.parameters())
    )


def _trial_problem(module: Any, size: int) -> str | None:
    """Return the reason if the parts of a module compute other results than the whole.

    None if they compute the same.
    """
    problem = "it cannot be tried"
    number = min(_PER_PART * size, module.num_experts)
    with rng.fork_rng(), redirect_stdout(io.StringIO()):
        rng.set_seed(0)
        # Some kernels, such as those of grouped products, compute no float64.
        for (dtype, tolerance), width in itertools.product(_TOLERANCES.items(), _widths(module)):
            scores = torch.rand(size, _NUM_TOKENS, number, dtype=dtype, device="cpu")
            chosen = scores.topk(_NUM_CHOSEN)
            tokens, factors = torch.randn(size + 1, _NUM_TOKENS, width, dtype=dtype, device="cpu").split([size, 1])
            given = list(zip(tokens, chosen.indices, chosen.values, strict=True))
            try:
                whole = _few_experts(module, dtype, number)
                return _compare(whole.train(), given, factors, tolerance) or _compare(
                    whole.eval(), given, factors, tolerance
                )
            except TrialFailed as failed:
                problem = f"it cannot be tried: {failed}"
    return problem


def _few_experts(module: nn.Module, dtype: torch.dtype, number: int) -> nn.Module:
    """Return a copy of a module with its first ``number`` experts; raises `TrialFailed` if it cannot be copied."""
    try:
        copied: Any = random_copy(module, dtype, lambda value: value[:number])
    except Exception as error:
        raise TrialFailed(f"{type(error).__name__}: {error}") from None
    copied.num_experts = number
    return copied


def _compare(
    whole: nn.Module, given: Sequence[tuple[Tensor, Tensor, Tensor]], factors: Tensor, tolerance: float
) -> str | None:
    """Return the reason if parts of ``whole`` compute other results.

    Raises `TrialFailed` if the whole module raises.
    """
    whole.zero_grad()
    state = torch.get_rng_state()
    try:
        expected = [_run(whole, *one, factors) for one in given]
    except Exception as error:
        raise TrialFailed(f"{type(error).__name__}: {error}") from None
    if not torch.equal(state, torch.get_rng_state()):
        return "it draws random numbers"
    return _compare_parts(whole, given, factors, expected, tolerance)


def _compare_parts(
    whole: nn.Module,
    given: Sequence[tuple[Tensor, Tensor, Tensor]],
    factors: Tensor,
    expected: Sequence[Sequence[Tensor]],
    tolerance: float,
) -> str | None:
    """Return the reason if parts of ``whole``, each with its own tensors, compute other results than expected."""
    size = len(given)

    def compute(rank: int, comm: ThreadCommunicator) -> tuple[nn.Module, list[Tensor]]:
        own: dict[int, Any] = {
            id(value): nn.Parameter(value.detach().chunk(size)[rank].clone()) for value in whole.parameters()
        }
        part = copy.deepcopy(whole, own)
        ExpertDivision([part], TokenExchange(comm, rank, size))
        tokens, indices, weights = given[rank]
        return part, _run(part, tokens, indices, weights, factors)

    try:
        outcomes = run_threads(size, compute)
    except Exception as error:
        return f"its parts raise {type(error).__name__}: {error}"
    pairs = [
        pair for (_, found), wanted in zip(outcomes, expected, strict=True) for pair in zip(found, wanted, strict=True)
    ]
    for name, value in whole.named_parameters():
        parts = [parameter_at(part, name).grad for part, _ in outcomes]
        if value.grad is None or any(part is None for part in parts):
            return f"{name} gets no gradient"
        pairs.append((torch.cat([part for part in parts if part is not None]), value.grad / size))
    if all(is_close(result, reference, tolerance) for result, reference in pairs):
        return None
    return "its parts compute something else than the whole"


def _widths(module: nn.Module) -> list[int]:
    """Return the possible numbers of features of a token: the sizes of the dims of the weights."""
    return sorted({length for value in module.parameters() for length in value.shape[1:]})


def _run(module: nn.Module, tokens: Tensor, indices: Tensor, weights: Tensor, factors: Tensor) -> list[Tensor]:
    """Return the output of a module, and the gradients of a random linear function of it for tokens and weights."""
    given, scores = tokens.clone().requires_grad_(), weights.clone().requires_grad_()
    with torch.enable_grad():
        result = module(given, indices, scores)
        if result.shape != tokens.shape:
            raise TypeError(f"it returns shape {list(result.shape)} for tokens of shape {list(tokens.shape)}")
        torch.autograd.backward((result * factors).sum())  # `Tensor.backward` is replaced in plain cells
    assert given.grad is not None
    assert scores.grad is not None
    return [result.detach(), given.grad, scores.grad]
