"""PyTorch/XLA: operations are recorded, compiled as one program for each step, and run on every chip of a process.

One process owns all chips that are visible to it (SPMD): in the program tensors are whole, a batch is divided along its
first dim over a mesh of the chips, and the compiler inserts the collectives between them. Several processes, each with
one chip, average gradients through the communicator instead.

A step's program is compiled when its shapes are first seen, so nothing here may depend on numbers, only on shapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from accel_nb.config.sections import XlaOptions
from accel_nb.errors import ConfigError, MisuseError
from accel_nb.precision.forward import forward_in_precision
from accel_nb.precision.policy import Precision
from accel_nb.runtime.devices.registry import device_type
from accel_nb.runtime.distributed.communicator import Communicator
from accel_nb.runtime.distributed.gradients import fill_missing_gradients
from accel_nb.runtime.process.environment import prepare_for_xla
from accel_nb.runtime.process.hardware import why_no_xla
from accel_nb.runtime.tensors.instance_patching import replace_forward, restore_forward
from accel_nb.runtime.tensors.nested import find_tensors, to_device
from accel_nb.runtime.tensors.state_tree import map_state
from accel_nb.runtime.tensors.stepped import stepped_parameters
from accel_nb.runtime.world import World
from accel_nb.strategies.base import (
    Bundle,
    Capabilities,
    ReplicaStrategy,
    StepOutcome,
    multiply_gradients,
)

_AXIS = "chips"


def _open_device(world: World) -> torch.device:
    """Load torch_xla and return the device that represents every chip of this process."""
    prepare_for_xla(on_processor=device_type(world.device).is_host)
    import torch_xla  # pyright: ignore[reportMissingImports]
    import torch_xla.runtime as xr  # pyright: ignore[reportMissingImports]

    num_chips = xr.addressable_runtime_device_count()  # this opens the device
    if world.size == 1 and num_chips > 1 and not xr.is_spmd():
        xr.use_spmd()
    device = torch_xla.device()
    kind = device_type("xla")
    kind.note_opened()
    kind.seed_beside_torch(torch.initial_seed())
    try:
        torch.autograd.backward(torch.zeros((), device=device, requires_grad=True) * 1)
    except RuntimeError as error:  # autograd counts devices once, at the first backward pass of a process
        raise MisuseError(
            "this process has run a backward pass before torch_xla opened its device, which PyTorch cannot train on "
            "any more: start fresh workers (`%accelerate restart`), or build the Accelerator before anything trains"
        ) from error
    return device


class Xla(ReplicaStrategy):
    """Trains on the chips of this process as on one device."""

    options: XlaOptions
    name: ClassVar[str] = "xla"
    capabilities: ClassVar[Capabilities] = Capabilities(
        priority=10,
        device_types=frozenset({"cpu", "xla"}),
        overrides_step=True,
        places_batches=True,
        open_device=_open_device,
        problem=why_no_xla,
    )

    def __init__(self, options: XlaOptions | None, precision: Precision) -> None:
        super().__init__(options or XlaOptions(), precision)
        if precision.policy.loss_scaling:
            raise ConfigError(
                "precision fp16 cannot run under the strategy 'xla', which would have to wait for the device in every "
                "step to see whether gradients overflowed: use bf16 or no"
            )
        self._wrapped: dict[int, nn.Module] = {}
        self._local: set[int] = set()
        # The size of an optimizer's state when it was sharded last, by the id of the optimizer.
        self._num_sharded: dict[int, int] = {}

    def open(self, world: World, comm: Communicator) -> None:
        """Enter the world; the device must be open."""
        import torch_xla  # pyright: ignore[reportMissingImports]
        import torch_xla.distributed.spmd as spmd  # pyright: ignore[reportMissingImports]
        import torch_xla.runtime as xr  # pyright: ignore[reportMissingImports]

        self._world, self._comm = world, comm
        self._xla, self._spmd = torch_xla, spmd
        self._device = torch_xla.device()
        self._kind = xr.device_type()
        self._num_chips = xr.global_runtime_device_count() if xr.is_spmd() else 1
        chips = list(range(self._num_chips))
        self._mesh = spmd.Mesh(chips, (self._num_chips,), (_AXIS,)) if self._num_chips > 1 else None

    def model_init(self) -> AbstractContextManager[Any]:
        """Return a context that changes nothing: models are built on the CPU, and moved from there."""
        return nullcontext()

    @torch.no_grad()
    def wrap(self, bundle: Bundle) -> Bundle:
        """Make models compute in the precision's dtype; every rank gets rank 0's weights, and every chip its shard."""
        for model in bundle.models:
            if id(model) in self._wrapped:
                continue
            if self._world.size > 1:
                for value in (*model.parameters(), *model.buffers()):
                    self._comm.broadcast(value)
            if self.precision.policy.compute is not None:
                replace_forward(model, forward_in_precision(model, self.precision))
            self._wrapped[id(model)] = model
            self._shard_tensors(model.parameters())
        return bundle

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Restore the class of the model, which stays on the device."""
        if self._wrapped.pop(id(model), None) is not None and self.precision.policy.compute is not None:
            restore_forward(model)
        return model

    def data_coords(self) -> tuple[int, int]:
        """Return rank and size: all chips of a process read one share."""
        return self._world.rank, self._world.size

    def place(self, batch: Any) -> Any:
        """End the program of the batch before, and return this one on the device, divided among the chips.

        A batch whose length is not divisible by the number of chips is replicated on each: same result, but slower.
        """
        self._xla.sync()
        batch = to_device(batch, self._device)
        if self._mesh is not None:
            for tensor in find_tensors(batch):
                if tensor.dim() and tensor.shape[0] % self._num_chips == 0:
                    self._mark(tensor, 0)
        return batch

    def grad_sync(self, model: nn.Module, enabled: bool) -> None:
        """Do nothing: gradients of several processes are averaged once, before the step."""

    def keep_local(self, model: nn.Module, enabled: bool) -> None:
        """Set whether the model's gradients stay on each rank."""
        (self._local.add if enabled else self._local.discard)(id(model))

    def backward(
        self,
        loss: Tensor,
        bundle: Bundle,
        *,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Sequence[Tensor] | None = None,
    ) -> None:
        """Record the backward pass."""
        torch.autograd.backward(self.precision.scale(loss), None, retain_graph, create_graph, inputs=inputs)

    @torch.no_grad()
    def finish_gradients(self, bundle: Bundle, factor: float | Tensor) -> None:
        """Average over processes, if there are several, and multiply by ``factor``."""
        if self._world.size > 1:
            self._average(bundle)
        multiply_gradients(bundle, factor)

    def step(self, optimizer: Optimizer) -> StepOutcome:
        """Step the optimizer, and run everything recorded since the last step as one program."""
        outcome = super().step(optimizer)
        if self._num_sharded.get(id(optimizer)) != len(optimizer.state):
            self._shard_optimizer_state(optimizer)
        self._xla.sync()
        return outcome

    def read_state(self, bundle: Bundle, *, copied: bool = True) -> dict[str, Any]:
        """Return every state dict in host memory: the device has no addresses that show which tensors are shared."""
        self._xla.sync()
        host = _Host(copied)
        weights = [model.state_dict(keep_vars=True) for model in bundle.models]
        for values in weights:
            values.update({name: host.take(value) for name, value in values.items()})
        return {
            "models": weights,
            "optimizers": [host.take(optimizer.state_dict()) for optimizer in bundle.optimizers],
            "schedulers": [host.take(scheduler.state_dict()) for scheduler in bundle.schedulers],
            "precision": self.precision.state_dict(),
        }

    @torch.no_grad()
    def write_state(self, bundle: Bundle, state: Mapping[str, Any]) -> None:
        """Load every state dict, and shard again the tensors that were sharded."""
        super().write_state(bundle, state)
        for model in bundle.models:
            self._shard_tensors(model.parameters())
        for optimizer in bundle.optimizers:
            self._shard_optimizer_state(optimizer)
        self._xla.sync()

    def describe(self) -> dict[str, Any]:
        """Describe the number and kind of chips that this process drives, and whether they shard the parameters."""
        description: dict[str, Any] = {"chips": f"{self._num_chips} x {self._kind}"}
        return description | ({"shard_params": True} if self._shards_params else {})

    def close(self) -> None:
        """Unwrap every model."""
        for model in list(self._wrapped.values()):
            self.unwrap(model)

    @property
    def _shards_params(self) -> bool:
        return self.options.shard_params and self._mesh is not None

    def _average(self, bundle: Bundle) -> None:
        """Average the gradients that the bundle's optimizers step; missing ones count as zero."""
        stepped = set(map(id, stepped_parameters(*bundle.optimizers)))
        models = [model for key, model in self._wrapped.items() if key not in self._local]
        found = {id(value): value for model in models for value in model.parameters() if id(value) in stepped}
        trained = [value for value in found.values() if value.requires_grad]
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for gradient in fill_missing_gradients(self._comm, trained):
            by_dtype.setdefault(gradient.dtype, []).append(gradient)
        for gradients in by_dtype.values():
            # On the host, in one tensor: each transfer ends the program that is being recorded.
            flat = torch.cat([gradient.flatten() for gradient in gradients]).cpu()
            means = self._comm.all_reduce(flat, "mean").to(self._device)
            sizes = [gradient.numel() for gradient in gradients]
            for gradient, mean in zip(gradients, means.split(sizes), strict=True):
                gradient.copy_(mean.view_as(gradient))

    def _shard_tensors(self, tensors: Iterable[Tensor]) -> None:
        """Shard tensors along the largest dim that is divisible by the number of chips, if the options require it."""
        if not self._shards_params:
            return
        for tensor in tensors:
            dims = [dim for dim, size in enumerate(tensor.shape) if size and size % self._num_chips == 0]
            if dims:
                self._mark(tensor, max(dims, key=lambda dim, shape=tensor.shape: shape[dim]))

    def _shard_optimizer_state(self, optimizer: Optimizer) -> None:
        self._num_sharded[id(optimizer)] = len(optimizer.state)
        self._shard_tensors(
            value
            for parameter, values in optimizer.state.items()
            for value in values.values()
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.device == parameter.device
        )

    def _mark(self, tensor: Tensor, dim: int) -> None:
        spec = tuple(_AXIS if place == dim else None for place in range(tensor.dim()))
        self._spmd.mark_sharding(tensor.data, self._mesh, spec)


class _Host:
    """Copies states into host memory; a tensor that appears twice is copied once."""

    def __init__(self, copied: bool) -> None:
        self._copied = copied
        self._known: dict[int, tuple[Tensor, Tensor]] = {}

    def take(self, state: Any) -> Any:
        """Return a state with each tensor on the host."""
        return map_state(self._copy_leaf, state)

    def _copy_leaf(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in self._known:
            found = leaf.detach()
            found = found.cpu() if not found.is_cpu else found.clone() if self._copied else found
            self._known[id(leaf)] = leaf, found
        return self._known[id(leaf)][1]
