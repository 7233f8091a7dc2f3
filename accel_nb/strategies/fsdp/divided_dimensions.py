"""The dimensions in which ranks compute a model together: its layers, blocks, sequences and experts.

Their degrees, the plans by which models are divided, and the reasons why models cannot be divided.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch._dynamo.eval_frame import OptimizedModule

from accel_nb.config.sections import FsdpOptions
from accel_nb.precision.policy import PrecisionPolicy
from accel_nb.runtime.mesh import Mesh
from accel_nb.strategies.base import Refusal, Stages
from accel_nb.strategies.context_parallel.divided_sequences import refuse_blocks
from accel_nb.strategies.expert_parallel.expert_plan import plan_experts
from accel_nb.strategies.fsdp.sharded_model import ShardedModel
from accel_nb.strategies.pipeline.stage_plan import StagePlan, plan_stages
from accel_nb.strategies.tensor_parallel.plan import DivisionPlan, plan_division


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """The layers and blocks of a model that are divided, and the names of its modules of divided experts."""

    layers: DivisionPlan | None
    stages: StagePlan | None
    experts: Sequence[str]


class DividedDimensions:
    """The numbers of ranks that compute layers (`tp`), sequences (`cp`), blocks (`stages`) and experts (`ep`) together.

    All are 1 until they are set. Plans of models are kept until `clear_plans`, since they make trials.
    """

    def __init__(self) -> None:
        self.tp = 1
        self.cp = 1
        self.ep = 1
        self.stages = Stages()
        # Whether the other ranks hold replicas instead of shards of the model.
        self.replicates = False
        self.clear_plans()

    def clear_plans(self) -> None:
        """Discard the plans of models, which code may change before they are prepared again."""
        # By model: its layers to divide.
        self._layer_plans: weakref.WeakKeyDictionary[nn.Module, DivisionPlan] = weakref.WeakKeyDictionary()
        # By model: the names of its modules of experts.
        self._expert_plans: weakref.WeakKeyDictionary[nn.Module, list[str]] = weakref.WeakKeyDictionary()

    @property
    def are_divided(self) -> bool:
        """Whether ranks compute layers, sequences, blocks or experts together."""
        return max(self.tp, self.cp, self.stages.number, self.ep) > 1

    def plan_of(self, model: nn.Module) -> ModelPlan:
        """Return the plan of a model that is not refused."""
        layers = self._plan_layers(model) if self.tp > 1 else None
        assert not isinstance(layers, Refusal), "refused before"
        stages = self._plan_stages(model) if self.stages.number > 1 else None
        experts = self._plan_experts(model) if self.ep > 1 else []
        return ModelPlan(
            layers,
            None if isinstance(stages, Refusal) else stages,
            [] if isinstance(experts, Refusal) else experts,
        )

    def refusal(
        self,
        models: Sequence[nn.Module],
        prepared: Collection[ShardedModel],
        options: FsdpOptions,
        policy: PrecisionPolicy,
    ) -> Refusal | None:
        """Return the reason if models cannot be divided together with prepared ones.

        None if they can, or nothing is divided.
        """
        if not self.are_divided:
            return None
        found = self._refuse_options(models, options, policy)
        dimensions: tuple[tuple[int, Callable[[nn.Module], Any], Callable[[ShardedModel], Any]], ...] = (
            (self.stages.number, self._plan_stages, lambda wrapped: wrapped.pipeline),
            (self.cp, lambda model: refuse_blocks(model, self.cp), lambda wrapped: wrapped.sequences),
            (self.ep, self._plan_experts, lambda wrapped: wrapped.experts),
        )
        for degree, plan, division_of in dimensions:
            if found is None and degree > 1:
                is_divided = any(division_of(wrapped) is not None for wrapped in prepared)
                found = _refuse_all(models, plan, is_divided=is_divided)
        return self._refuse_layers(models, prepared) if found is None and self.tp > 1 else found

    def _refuse_options(
        self, models: Sequence[nn.Module], options: FsdpOptions, policy: PrecisionPolicy
    ) -> Refusal | None:
        """Return the refusal of an option that cannot be combined with divided layers or blocks; None if all can."""
        unsupported = {
            f"precision {policy.name}": policy.loss_scaling or policy.name == "fp8",
            "fsdp.weights": options.weights is not None,
            "fsdp.cpu_offload": options.cpu_offload,
            "fsdp.float8_gather": options.float8_gather,
        }
        degrees = {"tp": self.tp, "cp": self.cp, "pp": self.stages.number, "ep": self.ep}
        dimension = next(f"mesh.{name} {degree}" for name, degree in degrees.items() if degree > 1)
        for name, is_set in unsupported.items():
            if is_set:
                return Refusal(f"{dimension} cannot be combined with {name}", "leave out one of the two")
        compiled = next((model for model in models if isinstance(model, OptimizedModule)), None)
        if compiled is not None:
            return Refusal(
                f"{dimension} cannot be combined with torch.compile of a {type(compiled._orig_mod).__name__}",
                "leave out one of the two",
            )
        return None

    def _refuse_layers(self, models: Sequence[nn.Module], prepared: Collection[ShardedModel]) -> Refusal | None:
        """Return the reason if layers of these models cannot be divided.

        None if any prepared model has divided layers.
        """
        with_parameters = [model for model in models if any(True for _ in model.parameters())]
        plans = [self._plan_layers(model) for model in with_parameters]
        refused = next((plan for plan in plans if isinstance(plan, Refusal)), None)
        if refused is not None or not plans or any(isinstance(plan, DivisionPlan) and plan.groups for plan in plans):
            return refused
        if any(wrapped.plan is not None and wrapped.plan.groups for wrapped in prepared):
            return None
        named = ", ".join(type(model).__name__ for model in with_parameters)
        reasons = {
            f"{kind}: {why}"
            for plan in plans
            if isinstance(plan, DivisionPlan)
            for kind, why in plan.not_divided.items()
        }
        return Refusal(
            f"mesh.tp {self.tp} finds no layers to divide in {named}"
            + (f" ({'; '.join(sorted(reasons))})" if reasons else ""),
            "train with --tp 1; --strategy fsdp divides any model",
        )

    def _plan_layers(self, model: nn.Module) -> DivisionPlan | Refusal:
        plan = self._layer_plans.get(model) or plan_division(model, self.tp)
        if isinstance(plan, DivisionPlan):
            self._layer_plans[model] = plan
        return plan

    def _plan_experts(self, model: nn.Module) -> list[str] | Refusal:
        found = self._expert_plans.get(model) or plan_experts(model, self.ep)
        if isinstance(found, list):
            self._expert_plans[model] = found
        return found

    def _plan_stages(self, model: nn.Module) -> StagePlan | Refusal:
        stages = self.stages
        return plan_stages(
            model,
            stages.number,
            stages.split_points,
            stages_per_rank=stages.per_rank,
            is_in_micro_batches=stages.micro_batches > 1,
        )


def describe_divided(wrapped_models: Sequence[ShardedModel], place: Mesh) -> dict[str, Any]:
    """Describe, as values by name, the mesh in which models are divided, and their divided parts."""
    last = replace(place, rank=place.size - 1)
    divided = [wrapped.pipeline.plan.describe() for wrapped in wrapped_models if wrapped.pipeline is not None]
    plans = [wrapped.plan for wrapped in wrapped_models if wrapped.plan is not None]
    if plans:
        num_divided = sum(plan.num_divided for plan in plans)
        num_layers = sum(plan.num_layers for plan in plans)
        divided.append(f"{num_divided} of {num_layers} linear layers divided")
    description: dict[str, Any] = {
        "mesh": ", ".join([f"{place.describe()} (rank {last.rank} is {last.describe_rank()})", *divided])
    }
    for wrapped in wrapped_models:
        description |= {} if wrapped.sequences is None else wrapped.sequences.describe()
        if wrapped.experts is not None:
            description["experts"] = wrapped.experts.describe()
    if any(group.draws for plan in plans for group in plan.groups):
        description["dropout"] = "in divided layers differs from that of one device"
    for plan in plans:
        description |= {f"{kind} not divided:": why for kind, why in plan.not_divided.items()}
    return description


def _refuse_all(models: Sequence[nn.Module], plan: Callable[[nn.Module], Any], *, is_divided: bool) -> Refusal | None:
    """Return the reason if no model can be divided in this way; None if one can, or a prepared model is."""
    plans = [plan(model) for model in models if any(True for _ in model.parameters())]
    refused = [found for found in plans if isinstance(found, Refusal)]
    return None if is_divided or len(refused) < len(plans) else next(iter(refused), None)
