"""Read-only views of this process's rank and world, with the names of accelerate.

Objects of `PartialState`, `AcceleratorState` and `GradientState` share no state. Each is built from the environment,
the open process group or one accelerator, so two accelerators in one process do not affect each other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from accel_nb.accelerator.options.fsdp_plugin import FullyShardedDataParallelPlugin
from accel_nb.accelerator.options.plugins import DeepSpeedPlugin, enum_value
from accel_nb.accelerator.process.init_world import initialize_world
from accel_nb.config import Layer, current_layers, environment_layer, resolve
from accel_nb.data.split import split_inputs
from accel_nb.errors import MisuseError
from accel_nb.precision.choice import choose_precision
from accel_nb.runtime.devices.registry import device_type
from accel_nb.runtime.distributed.collectives import Collectives
from accel_nb.runtime.distributed.communicator import Communicator
from accel_nb.runtime.distributed.process_group import DefaultGroup
from accel_nb.runtime.process.environment import option_variables
from accel_nb.runtime.world import World

if TYPE_CHECKING:
    from accel_nb.accelerator.training.accumulation import AccumulationWindow
    from accel_nb.config.schema import Config

Function = TypeVar("Function", bound=Callable[..., Any])


class DistributedType(str, Enum):
    """Kind of devices or strategy that a world trains with; each member equals its name as text."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    XLA = "XLA"
    MEGATRON_LM = "MEGATRON_LM"
    # accel_nb does not train on this hardware; scripts compare with these members.
    MULTI_HPU = "MULTI_HPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_NEURON = "MULTI_NEURON"
    MULTI_NPU = "MULTI_NPU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_XPU = "MULTI_XPU"

    def __str__(self) -> str:
        return self.value


class ProcessView:
    """Properties and methods that depend on this process's rank: numbers, order of execution, division of inputs."""

    _world: World
    _comm: Communicator
    _collectives: Collectives
    _device: torch.device

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        return self._device

    @property
    def num_processes(self) -> int:
        """The number of ranks that train together."""
        return self._world.size

    @property
    def process_index(self) -> int:
        """This process's rank."""
        return self._world.rank

    @property
    def local_process_index(self) -> int:
        """This process's rank on its machine."""
        return self._world.local_rank

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self._world.is_main

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first rank on its machine."""
        return self._world.is_local_main

    @property
    def is_last_process(self) -> bool:
        """Whether this is the highest rank."""
        return self._world.is_last

    @property
    def use_distributed(self) -> bool:
        """Whether there is more than one rank."""
        return self._world.size > 1

    @property
    def distributed_type(self) -> DistributedType:
        """``NO`` for one rank, else ``MULTI_GPU`` or ``MULTI_CPU``."""
        if self._world.size == 1:
            return DistributedType.NO
        return DistributedType.MULTI_CPU if device_type(self._device).is_host else DistributedType.MULTI_GPU

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Yield this rank's contiguous part of a list, tuple, tensor, array, or dict of these.

        Lengths of parts differ by at most one. Parts are empty if there are fewer items than ranks; with
        ``apply_padding`` the last item is repeated until all parts have the same length. The input is not changed.
        """
        yield split_inputs(inputs, self.process_index, self.num_processes, pad=apply_padding)

    def wait_for_everyone(self) -> None:
        """Wait until every rank has made this call."""
        self._collectives.barrier()

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Run the block on rank 0 before the others, for example to download files once."""
        yield from self._ordered(self.is_main_process)

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """Run the block on each machine's first rank before the others."""
        yield from self._ordered(self.is_local_main_process)

    def on_main_process(self, function: Function) -> Function:
        """Decorate a function to run on rank 0 only; elsewhere it returns None."""
        return _only_if(self.is_main_process, function)

    def on_local_main_process(self, function: Function) -> Function:
        """Decorate a function to run on each machine's first rank only."""
        return _only_if(self.is_local_main_process, function)

    def on_last_process(self, function: Function) -> Function:
        """Decorate a function to run on the last rank only."""
        return _only_if(self.is_last_process, function)

    def on_process(self, function: Callable[..., Any] | None = None, *, process_index: int = 0) -> Any:
        """Decorate a function to run on one rank only."""
        is_here = self.process_index == process_index
        return functools.partial(_only_if, is_here) if function is None else _only_if(is_here, function)

    def on_local_process(self, function: Callable[..., Any] | None = None, *, local_process_index: int = 0) -> Any:
        """Decorate a function to run on one rank of each machine only."""
        is_here = self.local_process_index == local_process_index
        return functools.partial(_only_if, is_here) if function is None else _only_if(is_here, function)

    def print(self, *values: Any, **options: Any) -> None:
        """Print on the first rank of each machine only."""
        if self.is_local_main_process:
            print(*values, **options)

    def _ordered(self, goes_first: bool) -> Iterator[None]:
        if not goes_first:
            self._collectives.barrier()
        try:
            yield
        finally:
            if goes_first:
                self._collectives.barrier()


class PartialState(ProcessView):
    """This process's rank and device, for programs without an `Accelerator`.

    Under ``torchrun`` it opens the process group if none is open; then every rank must build it, and
    `destroy_process_group` closes the group. ``backend`` and ``timeout`` are used only if it opens the group. ``world``
    replaces the rank and device from the environment.
    """

    def __init__(
        self,
        cpu: bool = False,
        *,
        backend: str | None = None,
        timeout: timedelta | None = None,
        world: World | None = None,
    ) -> None:
        given = {"group.backend": backend, "group.timeout": None if timeout is None else timeout.total_seconds()}
        self._set_up(_resolve(given, "PartialState(...)").config, cpu, world)

    def _set_up(self, config: Config, cpu: bool, world: World | None) -> None:
        self._comm, self._group = initialize_world(None, world, cpu, config.group)
        self._collectives = Collectives(self._comm, verify=config.debug)
        self._world = self._comm.world
        self._device = device_type(self._world.device).make_current(torch.device(self._world.device))
        self.debug = config.debug

    @property
    def backend(self) -> str | None:
        """The backend of the process group; None for a single process."""
        return DefaultGroup.open_backend() if DefaultGroup.is_open() else None

    @property
    def initialized(self) -> bool:
        """Return True: the state is complete when it is built."""
        return True

    @property
    def default_device(self) -> torch.device:
        """The device that this rank trains on."""
        return self._device

    def set_device(self) -> None:
        """Make this rank's device the process's current device; building the state does so already."""
        device_type(self._device).make_current(self._device)

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        """Do nothing, since no state is shared; for transformers and older notebooks, which call it."""

    def destroy_process_group(self) -> None:
        """Close the process group if this object has opened it; every rank must call."""
        if self._group is not None:
            self._group.close()
            self._group = None

    def __repr__(self) -> str:
        rank = f"rank {self._world.rank} of {self._world.size} on {self._device}"
        return f"{type(self).__name__}({rank}, {self.distributed_type})"


class AcceleratorState(PartialState):
    """This process's rank and device, and the precision to train in; see also `Accelerator.state`."""

    deepspeed_plugin: DeepSpeedPlugin | None = None
    """The DeepSpeed plugin of the accelerator, if it has one."""

    fsdp_plugin: FullyShardedDataParallelPlugin | None = None
    """The FSDP2 plugin of the accelerator, if it has one."""

    def __init__(
        self, mixed_precision: str | Enum | None = None, cpu: bool = False, *, world: World | None = None
    ) -> None:
        config = _resolve({"precision": enum_value(mixed_precision)}, "AcceleratorState(...)").config
        self._set_up(config, cpu, world)
        self.mixed_precision = choose_precision(config.precision, self._device)

    @classmethod
    def from_accelerator(
        cls,
        process: ProcessView,
        mixed_precision: str,
        *,
        debug: bool,
        plugin: DeepSpeedPlugin | FullyShardedDataParallelPlugin | None = None,
    ) -> AcceleratorState:
        """Return the state of an accelerator; the state does not own a process group."""
        state = cls.__new__(cls)
        state._comm, state._collectives, state._group = process._comm, process._collectives, None
        state._world, state._device, state.debug = process._world, process._device, debug
        state.mixed_precision = mixed_precision
        if isinstance(plugin, DeepSpeedPlugin):
            state.deepspeed_plugin = plugin
        else:
            state.fsdp_plugin = plugin
        return state


class _AccumulationOptions(Protocol):
    """The options that a `GradientState` reads."""

    @property
    def tail(self) -> str: ...

    @property
    def sync_each_batch(self) -> bool: ...


class GradientState:
    """A live, read-only view of the gradient accumulation of an accelerator."""

    def __init__(self, window: AccumulationWindow | None = None, options: _AccumulationOptions | None = None) -> None:
        if window is None or options is None:
            raise MisuseError(
                "a GradientState belongs to an accelerator: read accelerator.gradient_state instead of building one"
            )
        self._window = window
        self._options = options

    @property
    def sync_gradients(self) -> bool:
        """Whether an optimizer step follows the current (or latest) micro-batch."""
        return self._window.syncs_gradients

    @property
    def num_steps(self) -> int:
        """The number of micro-batches for one optimizer step."""
        return self._window.size

    @property
    def adjust_scheduler(self) -> bool:
        """Return True: schedulers step once for each optimizer step, not for each micro-batch."""
        return True

    @property
    def sync_with_dataloader(self) -> bool:
        """Whether an optimizer step follows a loader's last batch, even after fewer than ``num_steps`` batches."""
        return self._options.tail == "step"

    @property
    def sync_each_batch(self) -> bool:
        """Whether gradients are averaged after every micro-batch."""
        return self._options.sync_each_batch

    @property
    def in_dataloader(self) -> bool:
        """Whether a prepared loader is being iterated."""
        return self._window.share is not None

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the current batch is the last one of its loader."""
        return self._window.share is not None and self._window.share.is_last

    @property
    def remainder(self) -> int:
        """The number of samples of the current global batch on all ranks, if it is the loader's last; else -1."""
        share = self._window.share
        return share.total_samples if share is not None and share.is_last else -1

    def __repr__(self) -> str:
        return f"GradientState(sync_gradients={self.sync_gradients}, num_steps={self.num_steps})"


def _resolve(arguments: dict[str, Any], source: str) -> Any:
    given = {name: value for name, value in arguments.items() if value is not None}
    layers = list(current_layers()) or [environment_layer(option_variables())]
    return resolve([*layers, Layer("code", given, source)] if given else layers)


def _only_if(is_here: bool, function: Any) -> Any:
    # The result must not reference the accelerator, so that a decorated function does not keep it alive.
    @functools.wraps(function)
    def here_only(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if is_here else None

    return here_only
