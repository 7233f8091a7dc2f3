"""Plans of a forecast: the layouts that fit, and the choice among them. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from accel_nb.config.schema import OPTIONS
from accel_nb.forecast.layouts import CHECKPOINTING, LAYOUTS, Layout
from accel_nb.forecast.memory import Activations, MemoryUsage, estimate
from accel_nb.forecast.meshes import NO_MESH, MeshShape, MeshSizes, estimate_mesh, mesh_layouts
from accel_nb.forecast.sizes import ModelSizes

ROOM_SHARE = 0.9
"""Share of a device's memory to plan with; the rest is for the driver's context, libraries and fragmentation."""


@dataclass(frozen=True, slots=True)
class RunSetting:
    """The conditions of a run. Sizes in bytes; ``room`` is the memory of one device, ``host_room`` of the machine.

    ``batch_size`` is the number of samples in a loader's batch and ``share`` that of a rank; 0 if no batch is known.
    """

    world: int
    devices: str
    room: int
    host_room: int
    precision: str = "no"
    batch_size: int = 0
    share: int = 0
    is_host: bool = False
    """Whether the devices use the host's memory: then offloading has no use."""
    copy_ranks: int | None = None
    """How many ranks share one copy of the model under FSDP2 (``fsdp.hybrid_shard_size``); None: all."""
    mesh: MeshShape = NO_MESH
    """The mesh of the run's options: if it has several ranks in a dimension, only plans with it are made."""
    compared: tuple[MeshShape, ...] = ()
    """Other meshes to make plans for."""

    @property
    def is_half(self) -> bool:
        """Whether the run computes in half precision; fp8 saves the same activations as bf16."""
        return self.precision in ("bf16", "fp16", "fp8")


@dataclass(frozen=True, slots=True)
class Plan:
    """One layout with or without activation checkpointing, and its memory on each rank."""

    layout: Layout
    checkpoints: bool
    usage: MemoryUsage
    refusal: str | None = None
    """Why its strategy cannot train these models; None if it can or was not checked."""

    @property
    def name(self) -> str:
        """The layout's name, and whether activations are recomputed."""
        return self.layout.name + (" + activation checkpointing" if self.checkpoints else "")

    @property
    def options(self) -> dict[str, str | int | bool]:
        """The options that choose this plan, by their names in the schema."""
        return {**self.layout.options, **(CHECKPOINTING if self.checkpoints else {})}

    @property
    def is_supported(self) -> bool:
        """Whether this version supports these options."""
        return self.layout.is_supported and (not self.checkpoints or has_checkpointing())

    def missing_bytes(self, setting: RunSetting) -> int:
        """Return the bytes that one device lacks, or each rank's share of the host's; 0 if all fits."""
        return max(0, self.usage.total - setting.room, self.usage.host - setting.host_room // setting.world)


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
        return choose(self.plans, self.setting)


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
                checkpoints,
                estimate(
                    model,
                    layout,
                    setting.world,
                    is_half=setting.is_half,
                    activations=kept or Activations(0),
                    copy_ranks=setting.copy_ranks,
                ),
            )
            for layout in LAYOUTS
            if layout.fits_world(setting.world) and not (layout.offloads and setting.is_host)
            for checkpoints, kept in ((False, activations), (True, checkpointed))
            if not checkpoints or kept is not None
        ]
    )
    plans += [
        Plan(layout, checkpoints, estimate_mesh(sizes, layout, setting.world, kept, setting.is_half), sizes.refusal)
        for sizes in meshes
        for layout in mesh_layouts(sizes.shape, setting.world)
        for checkpoints, kept in ((False, sizes.activations), (True, sizes.checkpointed))
        if not checkpoints or kept is not None
    ]
    plans.sort(key=_cost)
    return Forecast(model, setting, tuple(plans), activations is not None, tuple(notes))


def _cost(plan: Plan) -> tuple[bool, bool, bool, int]:
    """Return a sort key by time: offloading costs most, then a mesh, then a second forward pass, then messages."""
    known = plan.layout in LAYOUTS
    order = LAYOUTS.index(plan.layout) if known else plan.usage.messages
    return plan.layout.offloads, not known, plan.checkpoints, order


def choose(plans: Sequence[Plan], setting: RunSetting) -> Plan | None:
    """Return the cheapest plan that fits, is supported and is not refused; None if there is none."""
    return min((plan for plan in fitting(plans, setting) if plan.refusal is None), key=_cost, default=None)


def fitting(plans: Sequence[Plan], setting: RunSetting) -> list[Plan]:
    """Return the plans that this version supports and that fit, including those that their strategies refuse."""
    return [plan for plan in plans if plan.is_supported and plan.missing_bytes(setting) == 0]


def refused_cheaper_plan(found: Forecast) -> Plan | None:
    """Return the cheapest plan that fits and is refused, if it is cheaper than the best; None if there is none."""
    best = found.best
    refused = (plan for plan in fitting(found.plans, found.setting) if plan.refusal is not None)
    first = min(refused, key=_cost, default=None)
    return None if first is None or (best is not None and _cost(best) < _cost(first)) else first


def smallest(plans: Sequence[Plan], setting: RunSetting) -> Plan:
    """Return the plan that lacks least memory, of those that are supported and not refused, if there are any."""
    supported = [plan for plan in plans if plan.is_supported and plan.refusal is None]
    return min(supported or plans, key=lambda plan: (plan.missing_bytes(setting), plan.usage.total))


def largest_share(plan: Plan, setting: RunSetting) -> int:
    """Return how many samples fit on a rank if activations grow in proportion; 0 if the weights alone do not fit."""
    usage = plan.usage
    remaining = setting.room - (usage.total - max(usage.activations + usage.exchange, usage.step)) - usage.exchange
    if remaining <= 0 or usage.activations == 0 or usage.host > setting.host_room // setting.world:
        return 0
    return setting.share * remaining // usage.activations
