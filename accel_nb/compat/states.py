"""The state classes of accelerate: all objects of a class in a process share one record.

In `accel_nb` each state object is separate; sharing exists in this package only.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

from accel_nb.accelerator import process_state
from accel_nb.accelerator.process.init_world import find_world
from accel_nb.accelerator.process_state import DistributedType
from accel_nb.compat.hf_utils import parse_flag_from_env
from accel_nb.data.loader import latest_share
from accel_nb.runtime.distributed.process_group import DefaultGroup
from accel_nb.runtime.process.environment import get_variable
from accel_nb.runtime.world import World

if TYPE_CHECKING:
    from accel_nb.accelerator.training.accumulation import AccumulationWindow
    from accel_nb.data.order import BatchShare


_RECORD_FIELDS = ("_world", "device", "backend", "debug", "mixed_precision")
"""Fields of the shared record; objects do not have them after a reset."""
_FIELDS_OF_PROCESS = ("_comm", "_collectives", "_group", "device_mesh")
"""Fields of the shared record that are connections of this process; copies for other processes do not have them."""


def world_of_variable(cpu: bool) -> World | None:
    """Return this process's world with the device of ``ACCELERATE_TORCH_DEVICE``; None if that is not set."""
    device = get_variable("ACCELERATE_TORCH_DEVICE", "")
    return replace(find_world(cpu), device=device) if device else None


class PartialState(process_state.PartialState):
    """This process's rank and device; built once, and shared by all objects of the class."""

    _shared_state: ClassVar[dict[str, Any]] = {}

    def __init__(self, cpu: bool = False, **kwargs: Any) -> None:
        self.__dict__ = self._shared_state
        if self.initialized:
            return
        backend, timeout = kwargs.get("backend"), kwargs.get("timeout")
        cpu = cpu or get_variable("ACCELERATE_USE_CPU", "false").lower() in ("1", "true")
        super().__init__(
            cpu,
            backend=backend,
            timeout=timeout if isinstance(timeout, timedelta) else None,
            world=world_of_variable(cpu),
        )
        self._cpu = cpu
        self.debug = self.debug or parse_flag_from_env("ACCELERATE_DEBUG_MODE")

    @property
    def initialized(self) -> bool:
        """Whether the state is built."""
        return bool(PartialState._shared_state)

    @property
    def fork_launched(self) -> bool:
        """Whether a notebook launcher has forked this process."""
        return parse_flag_from_env("FORK_LAUNCHED")

    def destroy_process_group(self, group: Any = None) -> None:
        """Close the process group if this class has opened it; every rank must call."""
        super().destroy_process_group()

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        """Clear the shared record; the next object creates a new one."""
        PartialState._shared_state.clear()

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields that a copy has in a process that has no state and cannot build one."""
        return {name: value for name, value in vars(self).items() if name not in _FIELDS_OF_PROCESS}

    def __setstate__(self, fields: dict[str, Any]) -> None:
        """Set a copy to the shared record of its own process, which is built if no other rank has to be waited for.

        Else the copy has ``fields``, those of the original.
        """
        kind = type(self)
        is_open = DefaultGroup.is_open() or find_world(cpu=True).size == 1
        if kind._shared_state or (kind is PartialState and is_open):
            self.__init__(cpu=fields.get("_cpu", False))
        else:
            self.__dict__ = fields

    def __getattr__(self, name: str) -> Any:
        """Raise AttributeError, with the reason if the shared record was cleared."""
        kind = type(self)
        if kind._shared_state or (not hasattr(kind, name) and name not in _RECORD_FIELDS):
            raise AttributeError(f"'{kind.__name__}' object has no attribute '{name}'")
        raise AttributeError(
            f"{kind.__name__}.{name} is not set: {kind.__name__}._reset_state() has cleared the state. Build an "
            "Accelerator or a state again"
        )


class AcceleratorState(PartialState):
    """This process's rank, device and precision, shared by all objects; the newest `Accelerator` sets it."""

    _shared_state: ClassVar[dict[str, Any]] = {}
    mixed_precision: str
    deepspeed_plugins: Any = None
    fsdp_plugin: Any = None
    parallelism_config: Any = None
    torch_tp_plugin: Any = None
    megatron_lm_plugin: Any = None
    dynamo_plugin: Any = None
    device_mesh: Any = None

    def __init__(self, mixed_precision: str | None = None, cpu: bool = False, **kwargs: Any) -> None:
        self.__dict__ = AcceleratorState._shared_state
        if self.initialized:
            current = self.__dict__.get("mixed_precision", mixed_precision)
            if mixed_precision is not None and mixed_precision != current:
                raise ValueError(
                    f"mixed_precision={mixed_precision!r}: the state of this process has {current!r} already; build "
                    "the Accelerator with it first, or call AcceleratorState._reset_state()"
                )
            return
        requested = mixed_precision or get_variable("ACCELERATE_MIXED_PRECISION", "no")
        found = process_state.AcceleratorState(requested.lower(), cpu, world=world_of_variable(cpu))
        self.__dict__.update(vars(found), _cpu=cpu)
        PartialState._shared_state.update(vars(found), _cpu=cpu)

    @property
    def initialized(self) -> bool:
        """Whether the state is built."""
        return bool(AcceleratorState._shared_state)

    @property
    def distributed_type(self) -> DistributedType:
        """The kind of training: ``DEEPSPEED`` if its plugin trains, ``FSDP`` if its plugin trains several processes."""
        if "assigned_type" in self.__dict__:
            return self.__dict__["assigned_type"]
        if self.use_distributed and self.fsdp_plugin is not None:
            return DistributedType.FSDP
        if self.deepspeed_plugin is not None:
            return DistributedType.DEEPSPEED
        return super().distributed_type

    @distributed_type.setter
    def distributed_type(self, distributed_type: DistributedType) -> None:
        """Set what is reported; it does not change how models train."""
        self.__dict__["assigned_type"] = distributed_type

    @property
    def deepspeed_plugin(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The selected DeepSpeed plugin; None if DeepSpeed does not train."""
        plugins = self.deepspeed_plugins
        if not isinstance(plugins, dict):
            return plugins
        return next((plugin for plugin in plugins.values() if plugin.selected), None)

    def get_deepspeed_plugin(self, name: str) -> Any:
        """Return a DeepSpeed plugin by its name in the dictionary that the `Accelerator` was given."""
        return self.deepspeed_plugins[name]

    def select_deepspeed_plugin(self, name: str) -> None:
        """Select the DeepSpeed plugin of the accelerators that are built next."""
        chosen = self.deepspeed_plugins[name]  # first: with a name that is not there the selection stays
        for plugin in self.deepspeed_plugins.values():
            plugin._unselect()
        chosen.select(_from_accelerator_state=True)

    @property
    def is_fsdp2(self) -> bool:
        """Whether FSDP trains; here it is always FSDP2."""
        return self.distributed_type is DistributedType.FSDP

    def destroy_process_group(self, group: Any = None) -> None:
        """Close the process group if `PartialState` has opened it; every rank must call."""
        PartialState().destroy_process_group()

    def set_from(self, state: process_state.AcceleratorState, **values: Any) -> None:
        """Set the shared record to the state of an accelerator."""
        PartialState._shared_state.update(vars(state))
        AcceleratorState._shared_state.pop("assigned_type", None)
        AcceleratorState._shared_state.update(vars(state), **values)

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        """Clear the shared record, and with ``reset_partial_state`` that of `PartialState`."""
        AcceleratorState._shared_state.clear()
        if reset_partial_state:
            PartialState._reset_state()


class GradientState:
    """The accumulation of gradients of the newest `Accelerator`; shared by all objects of the class."""

    _shared_state: ClassVar[dict[str, Any]] = {}

    def __init__(self, gradient_accumulation_plugin: Any = None) -> None:
        self.__dict__ = GradientState._shared_state
        if not self.initialized:
            self._sync_gradients, self.plugin_kwargs = True, {"num_steps": 1}
            self._window_of_accelerator: weakref.ref[AccumulationWindow] | None = None
            self._prepared_loaders: Callable[[], Iterable[Any]] = tuple
            # Each with the share of the batch in which its iteration began.
            self._own_loaders: list[tuple[weakref.ref[Any], BatchShare | None]] = []
        if gradient_accumulation_plugin is not None:
            given = gradient_accumulation_plugin.to_kwargs()
            self.plugin_kwargs = {**given, "num_steps": given.get("num_steps") or 1}

    def bind(self, window: AccumulationWindow, prepared_loaders: Callable[[], Iterable[Any]] = tuple) -> None:
        """Use an accelerator's accumulation window as the state; ``prepared_loaders`` returns its loaders."""
        self._window_of_accelerator, self._sync_gradients = weakref.ref(window), None
        self._prepared_loaders = prepared_loaders

    def _add_dataloader(self, dataloader: Any) -> None:
        """Record that a loader of this package, which is not prepared, is being iterated."""
        self._remove_dataloader(dataloader)
        self._own_loaders.append((weakref.ref(dataloader), self._share))

    def _remove_dataloader(self, dataloader: Any) -> None:
        """Record that the iteration of a loader is over."""
        self._own_loaders = [item for item in self._own_loaders if item[0]() not in (None, dataloader)]

    def __reduce__(self) -> Any:
        """Copy the state: a copy is one more object of this class, and shares the state of its process."""
        return GradientState, ()

    @property
    def initialized(self) -> bool:
        """Whether the state is built."""
        return bool(GradientState._shared_state)

    @property
    def _window(self) -> AccumulationWindow | None:
        """The window of the newest accelerator; None once that is freed: the shared record keeps no objects alive."""
        return None if self._window_of_accelerator is None else self._window_of_accelerator()

    @property
    def sync_gradients(self) -> bool:
        """Whether gradients of the current micro-batch are averaged and optimizers step."""
        if self._sync_gradients is not None or self._window is None:
            return self._sync_gradients is not False
        return self._window.syncs_gradients

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        """Set whether optimizers step, until the next `accumulate` block decides."""
        self._sync_gradients = None if sync_gradients and self._window is not None else sync_gradients

    @property
    def num_steps(self) -> int:
        """The number of micro-batches for one optimizer step."""
        return self.plugin_kwargs["num_steps"] if self._window is None else self._window.size

    @property
    def adjust_scheduler(self) -> bool:
        """Whether schedulers step at the end of a window only."""
        return self.plugin_kwargs.get("adjust_scheduler", True) is True

    @property
    def sync_with_dataloader(self) -> bool:
        """Whether a loader's last batch closes the window."""
        return self.plugin_kwargs.get("sync_with_dataloader") is not False

    @property
    def sync_each_batch(self) -> bool:
        """Whether gradients are averaged after every micro-batch."""
        return bool(self.plugin_kwargs.get("sync_each_batch"))

    @property
    def _own_loader(self) -> Any:
        """The loader of this package that is iterated in the innermost loop, or None."""
        share = self._share
        return next((ref() for ref, outer in reversed(self._own_loaders) if ref() is not None and outer is share), None)

    @property
    def _share(self) -> BatchShare | None:
        """The share of the batch that a prepared loader has yielded last; None outside of loops over them."""
        return None if self._window is None else self._window.share

    @property
    def in_dataloader(self) -> bool:
        """Whether a loader is being iterated."""
        return self._own_loader is not None or self._share is not None

    @property
    def active_dataloader(self) -> Any:
        """The loader that has yielded the current batch; None outside of loops."""
        share = self._share
        if share is None or self._own_loader is not None:
            return self._own_loader
        return next((loader for loader in self._prepared_loaders() if latest_share(loader) is share), None)

    @property
    def dataloader_references(self) -> list[Any]:
        """None, and the loaders that are being iterated, the innermost last."""
        own = [loader for reference, _ in self._own_loaders if (loader := reference()) is not None]
        active = self.active_dataloader
        return [None, *(loader for loader in own if loader is not active), *([] if active is None else [active])]

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the current batch is the last one of its loader."""
        if self._own_loader is not None:
            return self._own_loader.end_of_dataloader
        share = self._share
        return share is not None and share.is_last

    @property
    def remainder(self) -> int:
        """The number of samples of the current global batch, if it is the loader's last; else -1."""
        if self._own_loader is not None:
            return self._own_loader.remainder
        share = self._share
        return share.total_samples if share is not None and share.is_last else -1

    @property
    def is_xla_gradients_synced(self) -> bool:
        """Return False: under XLA the strategy averages gradients itself."""
        return False

    @staticmethod
    def _reset_state() -> None:
        """Clear the shared record."""
        GradientState._shared_state.clear()

    def __repr__(self) -> str:
        return f"GradientState(sync_gradients={self.sync_gradients}, num_steps={self.num_steps})"
