"""Plans of a forecast: the layouts that fit, and the choice among them. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from accel_nb.config.schema import OPTIONS
from accel_nb.forecast.layouts import CHECKPOINTING, LAYOUTS, Layout
from accel_nb.forecast.memory import Activations, MemoryUsage, estimate
from accel_nb.forecast.meshes import NO_MESH, MeshShape, MeshSizes, estimate_mesh, mesh_layouts
from accel_nb.forecast.sizes import ModelSizes

USABLE_FRACTION = 0.9
"""Fraction of a device's memory to plan with; the rest is for the driver's context, libraries and fragmentation."""


@dataclass(frozen=True, slots=True)
class RunSetting:
    """The conditions of a run; ``device_bytes`` is the memory of one device, ``host_bytes`` that of the machine.

    ``batch_size`` is the number of samples in a loader's batch, and ``samples_per_rank`` that of a rank; 0 if no batch
    is known.
    """

    world: int
    devices: str
    device_bytes: int
    host_bytes: int
    precision: str = "no"
    batch_size: int = 0
    samples_per_rank: int = 0
    uses_host_memory: bool = False
    """Whether the devices use the host's memory: then offloading has no use."""
    ranks_per_replica: int | None = None
    """How many ranks share one copy of the model under FSDP2 (``fsdp.hybrid_shard_size``); None: all."""
    mesh: MeshShape = NO_MESH
    """The mesh of the run's options: if it has several ranks in a dimension, only plans with it are made."""
    compared_meshes: tuple[MeshShape, ...] = ()
    """Other meshes to make plans for."""

    @property
    def is_half(self) -> bool:
        """Whether the run computes in half precision; fp8 saves the same activations as bf16."""
        return self.precision in ("bf16", "fp16", "fp8")


@dataclass(frozen=True, slots=True)
class Plan:
    """A layout with or without activation checkpointing, and its memory on each rank."""

    layout: Layout
    is_checkpointed: bool
    usage: MemoryUsage
    refusal: str | None = None
    """Why its strategy cannot train these models; None if it can or was not checked."""

    @property
    def name(self) -> str:
        """The layout's name, and whether activations are recomputed."""
        return self.layout.name + (" + activation checkpointing" if self.is_checkpointed else "")

    @property
    def options(self) -> dict[str, str | int | bool]:
        """The options that choose this plan, by their names in the schema."""
        return {**self.layout.options, **(CHECKPOINTING if self.is_checkpointed else {})}

    @property
    def is_supported(self) -> bool:
        """Whether this version supports these options."""
        return self.layout.is_supported and (not self.is_checkpointed or has_checkpointing())

    def missing_bytes(self, setting: RunSetting) -> int:
        """Return the bytes that one device lacks, or each rank's share of the host's; 0 if all fits."""
        return max(0, self.usage.total - setting.device_bytes, self.usage.host - setting.host_bytes // setting.world)


@dataclass(frozen=True, slots=True)
class Forecast:
    """All plans for one model in one setting, the preferred first; ``notes`` list what could not be determined."""

    model: ModelSizes
    setting: RunSetting
    plans: tuple[Plan, ...]
    has_activations: bool
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> Plan | None:
        """The cheapest plan that fits, None if none does."""
        return choose_plan(self.plans, self.setting)


def has_checkpointing() -> bool:
    """Return whether this version has the option that recomputes activations."""
    return all(name in OPTIONS for name in CHECKPOINTING)


def forecast(
    model: ModelSizes,
    setting: RunSetting,
    activations: Activations | None = None,
    checkpointed: Activations | None = None,
    notes: Sequence[str] = (),
    meshes: Sequence[MeshSizes] = (),
) -> Forecast:
    """Return the memory of every layout that applies; ``checkpointed`` is the activations if blocks are recomputed.

    Without ``activations`` they count as 0, and `Forecast.has_activations` is false. ``meshes`` are what a rank
    holds of the model in each mesh of the setting.
    """
    plans = (
        []
        if setting.mesh.size > 1
        else [
            Plan(
                layout,
                is_checkpointed,
                estimate(
                    model,
                    layout,
                    setting.world,
                    is_half=setting.is_half,
                    activations=saved or Activations(0),
                    ranks_per_replica=setting.ranks_per_replica,
                ),
            )
            for layout in LAYOUTS
            if layout.supports_world(setting.world) and not (layout.offloads and setting.uses_host_memory)
            for is_checkpointed, saved in ((False, activations), (True, checkpointed))
            if not is_checkpointed or saved is not None
        ]
    )
    plans += [
        Plan(
            layout, is_checkpointed, estimate_mesh(sizes, layout, setting.world, saved, setting.is_half), sizes.refusal
        )
        for sizes in meshes
        for layout in mesh_layouts(sizes.shape, setting.world)
        for is_checkpointed, saved in ((False, sizes.activations), (True, sizes.checkpointed))
        if not is_checkpointed or saved is not None
    ]
    plans.sort(key=_cost)
    return Forecast(model, setting, tuple(plans), activations is not None, tuple(notes))


def _cost(plan: Plan) -> tuple[bool, bool, bool, int]:
    """Return a sort key by time: offloading costs most, then a mesh, then a second forward pass, then communication."""
    known = plan.layout in LAYOUTS
    order = LAYOUTS.index(plan.layout) if known else plan.usage.sent_bytes
    return plan.layout.offloads, not known, plan.is_checkpointed, order


def choose_plan(plans: Sequence[Plan], setting: RunSetting) -> Plan | None:
    """Return the cheapest plan that fits, is supported and is not refused; None if there is none."""
    return min((plan for plan in fitting_plans(plans, setting) if plan.refusal is None), key=_cost, default=None)


def fitting_plans(plans: Sequence[Plan], setting: RunSetting) -> list[Plan]:
    """Return the plans that this version supports and that fit, including those that their strategies refuse."""
    return [plan for plan in plans if plan.is_supported and plan.missing_bytes(setting) == 0]


def refused_cheaper_plan(found: Forecast) -> Plan | None:
    """Return the cheapest plan that fits and is refused, if it is cheaper than the best; None if there is none."""
    best = found.best
    refused = (plan for plan in fitting_plans(found.plans, found.setting) if plan.refusal is not None)
    first = min(refused, key=_cost, default=None)
    return None if first is None or (best is not None and _cost(best) < _cost(first)) else first


def smallest_plan(plans: Sequence[Plan], setting: RunSetting) -> Plan:
    """Return the plan that lacks least memory, of those that are supported and not refused, if there are any."""
    supported = [plan for plan in plans if plan.is_supported and plan.refusal is None]
    return min(supported or plans, key=lambda plan: (plan.missing_bytes(setting), plan.usage.total))


def max_samples_per_rank(plan: Plan, setting: RunSetting) -> int:
    """Return how many samples fit on a rank if activations grow in proportion; 0 if the weights alone do not fit."""
    usage = plan.usage
    remaining = (
        setting.device_bytes
        - (usage.total - max(usage.activations + usage.communication_buffers, usage.step))
        - usage.communication_buffers
    )
    if remaining <= 0 or usage.activations == 0 or usage.host > setting.host_bytes // setting.world:
        return 0
    return setting.samples_per_rank * remaining // usage.activations
