"""Which ways of sharing memory fit, and which of them to take. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from accel_nb.config.schema import OPTIONS
from accel_nb.forecast.layouts import CHECKPOINTING, LAYOUTS, Layout
from accel_nb.forecast.memory import Activations, Usage, estimate
from accel_nb.forecast.sizes import Model

ROOM_SHARE = 0.9
"""Of a device's memory; the driver's context, what libraries take and what lies in pieces fits in the rest."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What a run is given. Sizes in bytes; ``room`` is of one device, ``host_room`` of the machine.

    ``batch_size`` is what a loader yields and ``share`` what each rank gets of it; 0 where no batch is known.
    """

    world: int
    devices: str
    room: int
    host_room: int
    precision: str = "no"
    batch_size: int = 0
    share: int = 0
    is_host: bool = False
    """Whether the devices' memory is the host's: then nothing is gained by moving things there."""
    copy_ranks: int | None = None
    """How many ranks share one copy of the model under FSDP2 (``fsdp.hybrid_shard_size``); None: all."""

    @property
    def is_half(self) -> bool:
        """Whether the run computes in half precision; fp8 keeps what bf16 keeps."""
        return self.precision in ("bf16", "fp16", "fp8")


@dataclass(frozen=True, slots=True)
class Plan:
    """One way to train, and what it takes on each rank."""

    layout: Layout
    checkpoints: bool
    usage: Usage
    refusal: str | None = None
    """Why its strategy does not train these models, where that was asked; None: it does."""

    @property
    def name(self) -> str:
        """The layout's name, and whether activations are computed twice."""
        return self.layout.name + (" + activation checkpointing" if self.checkpoints else "")

    @property
    def options(self) -> dict[str, str | int | bool]:
        """The options that choose this plan, by their names in the schema."""
        return {**self.layout.options, **(CHECKPOINTING if self.checkpoints else {})}

    @property
    def is_served(self) -> bool:
        """Whether this version has these options."""
        return self.layout.is_served and (not self.checkpoints or has_checkpointing())

    def missing(self, setting: Setting) -> int:
        """Return the bytes that one device lacks, or each rank's part of the host's; 0 if all fits."""
        return max(0, self.usage.total - setting.room, self.usage.host - setting.host_room // setting.world)


@dataclass(frozen=True, slots=True)
class Forecast:
    """All plans for one model in one setting, the preferred first; ``notes`` say what could not be known."""

    model: Model
    setting: Setting
    plans: tuple[Plan, ...]
    knows_activations: bool
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> Plan | None:
        """The cheapest plan that fits, None if none does."""
        return choose(self.plans, self.setting)


def has_checkpointing() -> bool:
    """Whether this version has the option that computes activations twice."""
    return all(name in OPTIONS for name in CHECKPOINTING)


def forecast(
    model: Model,
    setting: Setting,
    activations: Activations | None = None,
    checkpointed: Activations | None = None,
    notes: Sequence[str] = (),
) -> Forecast:
    """Return what every way that makes sense here takes; ``checkpointed`` holds activations where blocks recompute.

    Without ``activations`` they count as nothing, and the forecast says that they are not known.
    """
    plans = [
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
        if layout.serves(setting.world) and not (layout.offloads and setting.is_host)
        for checkpoints, kept in ((False, activations), (True, checkpointed))
        if not checkpoints or kept is not None
    ]
    plans.sort(key=_cost)
    return Forecast(model, setting, tuple(plans), activations is not None, tuple(notes))


def _cost(plan: Plan) -> tuple[bool, bool, int]:
    """Order plans by time: weights over the bus cost more than a second forward pass, that more than an exchange."""
    return plan.layout.offloads, plan.checkpoints, LAYOUTS.index(plan.layout)


def choose(plans: Sequence[Plan], setting: Setting) -> Plan | None:
    """Return the first plan in order of cost that fits, is served and is not refused; None if there is none."""
    return min((plan for plan in fitting(plans, setting) if plan.refusal is None), key=_cost, default=None)


def fitting(plans: Sequence[Plan], setting: Setting) -> list[Plan]:
    """Return the plans that this version serves and that fit, whether or not their strategies train these models."""
    return [plan for plan in plans if plan.is_served and plan.missing(setting) == 0]


def passed_over(found: Forecast) -> Plan | None:
    """Return the first plan that fits, is preferred to the best, and is refused; None if there is none."""
    best = found.best
    refused = (plan for plan in fitting(found.plans, found.setting) if plan.refusal is not None)
    first = min(refused, key=_cost, default=None)
    return None if first is None or (best is not None and _cost(best) < _cost(first)) else first


def smallest(plans: Sequence[Plan], setting: Setting) -> Plan:
    """Return, of the plans that this version serves, the one that lacks least."""
    served = [plan for plan in plans if plan.is_served and plan.refusal is None]
    return min(served or plans, key=lambda plan: (plan.missing(setting), plan.usage.total))


def largest_share(plan: Plan, setting: Setting) -> int:
    """Return how many samples a rank could take, as activations grow with them; 0 if weights alone are too large."""
    usage = plan.usage
    left = setting.room - (usage.total - max(usage.activations + usage.exchange, usage.step)) - usage.exchange
    if left <= 0 or usage.activations == 0 or usage.host > setting.host_room // setting.world:
        return 0
    return setting.share * left // usage.activations
