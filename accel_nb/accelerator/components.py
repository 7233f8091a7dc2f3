"""The components of an accelerator, and their construction from its settings."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum

import torch

from accel_nb.accelerator.prepare.activation_checkpointing import ActivationCheckpointer
from accel_nb.accelerator.prepare.compiling import Compiler, require_cpp_compiler
from accel_nb.accelerator.prepare.preparer import KeptLoaders, Preparer
from accel_nb.accelerator.prepare.strategy_selection import StrategySelection
from accel_nb.accelerator.process.init_world import initialize_world
from accel_nb.accelerator.process.seeding import checked_types
from accel_nb.accelerator.settings import Settings
from accel_nb.accelerator.state.training_state import TrainingState
from accel_nb.accelerator.tracking.tracked_run import TrackedRun
from accel_nb.accelerator.training.run_control import current_control_receiver
from accel_nb.accelerator.training.stepper import Stepper
from accel_nb.accelerator.training_run import TrainingRun
from accel_nb.config import Resolved
from accel_nb.precision import build_precision
from accel_nb.precision.fp8 import Float8Layers
from accel_nb.runtime import rng
from accel_nb.runtime.distributed.collectives import Collectives, VerifiedComm
from accel_nb.runtime.distributed.communicator import Communicator
from accel_nb.runtime.distributed.mesh_groups import MeshGroups
from accel_nb.runtime.distributed.process_group import DefaultGroup
from accel_nb.runtime.world import World
from accel_nb.strategies import Strategy, StrategyRegistry
from accel_nb.strategies.choice import AUTO, build
from accel_nb.telemetry.events import EventSink, current_sink
from accel_nb.telemetry.memory import MemoryMeter
from accel_nb.telemetry.step_meter import StepMeter
from accel_nb.telemetry.time_use import TimeMeter


@dataclass(frozen=True, slots=True)
class Components:
    """The internal components of one `Accelerator`, for the packages of accel_nb; scripts use its public methods."""

    resolved: Resolved
    comm: Communicator
    group: DefaultGroup | None
    """The process group, if the accelerator has opened it and so must close it."""
    collectives: Collectives
    device: torch.device
    sink: EventSink
    stepper: Stepper
    compiler: Compiler
    float8: Float8Layers | None
    recomputer: ActivationCheckpointer
    selection: StrategySelection
    preparer: Preparer
    tracked: TrackedRun
    state: TrainingState
    run: TrainingRun
    kept_loaders: KeptLoaders
    groups: MeshGroups
    """The mesh of the ranks, and the communicators of its dimensions."""

    @property
    def world(self) -> World:
        """This rank and the number of ranks."""
        return self.comm.world

    @property
    def strategy(self) -> Strategy:
        """The current strategy; preparing the first models may replace it."""
        return self.stepper.strategy

    @property
    def data_world(self) -> World:
        """The index of this rank's share of the data, and the number of shares; ranks of one model read the same."""
        index, count = self.strategy.data_coords()
        return World(rank=index, size=count)

    def close(self, *, is_alone: bool) -> None:
        """Release prepared objects and close the process group; every rank must call, unless this one ``is_alone``.

        If closing one component raises, such as for a loss that is NaN, the error is raised when all are closed.
        """
        with ExitStack() as parts:  # closed in the opposite order
            if self.group is not None:
                parts.callback(self.group.close)
            parts.callback(self.strategy.close)
            parts.callback(lambda: self.preparer.release(self.preparer.objects))
            if is_alone and self.stepper.gradient_holder is not None:  # ranks that were stopped may have other ones
                parts.callback(self.strategy.drop_gradients, self.stepper.bundle)
            parts.callback(self.stepper.flush)
            if (tracker_thread := self.tracked.end()) is not None:
                parts.callback(tracker_thread.close)
            self.state.close(is_alone=is_alone)


def build_components(
    owner: object,
    settings: Settings,
    *,
    comm: Communicator | None,
    world: World | None,
    cpu: bool,
    sink: EventSink | None,
    registry: StrategyRegistry | None,
    moves_objects: bool,
    rng_types: Sequence[str | Enum] | None,
) -> Components:
    """Join the process group and build the components of the accelerator ``owner``; every rank must call."""
    options = settings.options
    comm, group = initialize_world(comm, world, cpu, options.group)
    collectives = Collectives(comm, verify=options.debug)
    if options.debug and comm.world.size > 1:
        comm = VerifiedComm(comm)
    world = comm.world
    registry = registry or StrategyRegistry()
    requested = AUTO if settings.ignores_sharding(world) else options.strategy
    builder = build(requested, options, world, registry)
    device = builder.kind.capabilities.open_device(world)
    require_cpp_compiler(options.compile, device)
    precision = build_precision(options.precision, device, autocast=options.autocast, scaler=options.scaler)
    strategy = builder.build(precision)
    strategy.open(world, comm)
    groups = getattr(strategy, "groups", None) if strategy.capabilities.divides_layers else None
    groups = groups or MeshGroups.of_data(comm)
    sink = current_sink.get() if sink is None else sink
    stepper = _build_stepper(strategy, comm, device, sink, settings, counts_samples=groups.mesh.counts_samples)
    compiler, recomputer = Compiler(options.compile), ActivationCheckpointer(options.activation_checkpointing)
    float8 = Float8Layers(device, options.fp8) if precision.policy.name == "fp8" else None
    run = TrainingRun(stepper, comm, sink, options.checkpoint, current_control_receiver.get())
    kept_loaders = KeptLoaders()
    preparer = Preparer(
        owner,
        kept_loaders,
        stepper,
        comm,
        device,
        compiler=compiler,
        checkpointer=recomputer,
        float8=float8,
        options=options,
        moves_objects=moves_objects,
        rng_types=checked_types(rng_types),
        observer=run,
    )
    meter = stepper.meter
    tracked = TrackedRun(lambda: meter.step, has_trackers=bool(settings.trackers))
    state = TrainingState(
        comm, device, stepper, settings.resolved, prepared=lambda: preparer.objects, tracked=tracked, observer=run
    )
    run.start(state, preparer)
    if options.seed is not None:
        rng.set_seed(options.seed)
    selection = StrategySelection(strategy, settings.resolved, comm, device, registry)
    return Components(
        settings.resolved, comm, group, collectives, device, sink, stepper, compiler, float8, recomputer, selection,
        preparer, tracked, state, run, kept_loaders, groups,
    )  # fmt: skip


def _build_stepper(
    strategy: Strategy,
    comm: Communicator,
    device: torch.device,
    sink: EventSink,
    settings: Settings,
    *,
    counts_samples: bool,
) -> Stepper:
    options, rank, precision = settings.options, comm.world.rank, strategy.precision
    return Stepper(
        strategy,
        comm.world,
        comm,
        accumulate=options.accumulate,
        clip=options.clip,
        meter=StepMeter(rank, device, sink, raises_on_nan=options.sentinels and not precision.policy.loss_scaling),
        memory=MemoryMeter(rank, device, sink),
        time_use=TimeMeter(rank, device, sink),
        window=options.accumulation,
        has_checks=options.sentinels,
        counts_samples=counts_samples,
    )
