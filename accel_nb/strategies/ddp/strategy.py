"""PyTorch's DistributedDataParallel: one replica of the model on each rank, gradients averaged during backward.

Gradients that DDP did not reduce are averaged before the step instead: gradients of a model that was trained through a
method other than its forward, in evaluation mode, or by a second backward pass. With DDP alone the replicas would
become unequal.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from accel_nb.config.sections import DdpOptions
from accel_nb.errors import MisuseError
from accel_nb.precision.forward import forward_in_precision
from accel_nb.precision.policy import Precision
from accel_nb.runtime.distributed.communicator import Communicator
from accel_nb.runtime.distributed.gradients import fill_missing_gradients
from accel_nb.runtime.process.user_code import is_in_other_thread, warn_at_user_line
from accel_nb.runtime.tensors.instance_patching import replace_forward, restore_forward
from accel_nb.runtime.tensors.stepped import stepped_parameters
from accel_nb.runtime.tensors.transforms import is_in_transform
from accel_nb.runtime.torch_private import is_checked
from accel_nb.runtime.world import World
from accel_nb.strategies.base import Bundle, Capabilities, ReplicaStrategy, multiply_gradients
from accel_nb.strategies.ddp.comm_hooks import average_buckets, register_hook
from accel_nb.strategies.ddp.lean_ddp import LeanDdp
from accel_nb.strategies.ddp.reached_parameters import ReachedParameters
from accel_nb.strategies.local_gradients import LocalGradients


class Ddp(ReplicaStrategy):
    """Trains a replica of each model on each rank."""

    options: DdpOptions
    name: ClassVar[str] = "ddp"
    capabilities: ClassVar[Capabilities] = Capabilities(min_world=2, priority=50, replicates=True)

    def __init__(self, options: DdpOptions | None, precision: Precision) -> None:
        super().__init__(options or DdpOptions(), precision)
        # By id of the model.
        self._replicas: dict[int, _Replica] = {}
        # By id of the bundle: the bundle, and the replicas whose parameters its optimizers step.
        self._owners: dict[int, tuple[Bundle, list[_Replica]]] = {}
        self._window = _Window()
        # The number of the window whose gradients the current steps use.
        self._closing = -1
        # Whether a backward pass has run since the last step.
        self._has_new_gradients = False
        self._averages_every_pass = False

    def open(self, world: World, comm: Communicator) -> None:
        """Set the world and its communicator; the default process group must be open."""
        self._world = world
        self._comm = comm

    def prepare_for_plain_cells(self) -> None:
        """Leave the same gradients as one process after every backward pass, in separate memory."""
        self._averages_every_pass = True

    def model_init(self) -> AbstractContextManager[Any]:
        """Return a context that changes nothing: replicas are built as in plain PyTorch."""
        return nullcontext()

    def wrap(self, bundle: Bundle) -> Bundle:
        """Make a replica for every model with trainable parameters, with the weights of rank 0."""
        self._owners.clear()
        for model in bundle.models:
            if id(model) in self._replicas:
                continue
            forward = forward_in_precision(model, self.precision)
            if any(value.requires_grad or self._averages_every_pass for value in model.parameters()):
                # A class's own `parameters` may return tensors that are not registered, of which DDP finds none.
                is_registered = any(parameter.requires_grad for _, parameter in model.named_parameters())
                has_ddp = is_registered and not (self._has_reduced_parameter(model) or _is_refused(model))
                replica = _Replica(
                    model,
                    forward,
                    self._window,
                    self._stop_ddp,
                    self.options,
                    self._comm,
                    has_ddp=has_ddp,
                    is_of_plain_cell=self._averages_every_pass,
                )
                try:
                    replace_forward(model, replica.forward)
                except BaseException:
                    replica.close()
                    raise
                self._replicas[id(model)] = replica
            elif self.precision.policy.compute is not None:
                replace_forward(model, forward)
                self._replicas[id(model)] = _Replica(model, forward, self._window, self._stop_ddp, None, self._comm)
        return bundle

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Restore the class of the model and close its replica."""
        self._owners.clear()
        replica = self._replicas.pop(id(model), None)
        if replica is not None:
            restore_forward(model)
            replica.close()
        return model

    def data_coords(self) -> tuple[int, int]:
        """Return rank and size: each rank reads a different share."""
        return self._world.rank, self._world.size

    def grad_sync(self, model: nn.Module, enabled: bool) -> None:
        """Set whether the next backward pass averages the model's gradients."""
        replica = self._replicas.get(id(model))
        if replica is not None:
            replica.is_synced = enabled
            if replica.ddp is not None:
                replica.ddp.require_backward_grad_sync = enabled

    def keep_local(self, model: nn.Module, enabled: bool) -> None:
        """Set whether calls of the model bypass DDP, so that nothing is averaged."""
        replica = self._replicas.get(id(model))
        if replica is not None:
            replica.is_local = enabled

    def backward(
        self,
        loss: Tensor,
        bundle: Bundle,
        *,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Sequence[Tensor] | None = None,
    ) -> None:
        """Compute gradients of the scaled loss; DDP averages them in the backward pass."""
        self._has_new_gradients = True
        awaiting: list[_Replica] = []
        for replica in self._replicas.values():
            if replica.awaits_backward:
                replica.awaits_backward = False
                # A model that trains itself: DDP expects no gradients before the call has ended.
                if replica.is_computing or replica.uses_unrecorded(loss):
                    self._stop_ddp(replica)
                else:
                    awaiting.append(replica)
            elif not replica.has_finished():
                self._stop_ddp(replica)
        if create_graph and self._averages_every_pass:
            # DDP cannot write into gradients that belong to a graph.
            for replica in awaiting:
                self._stop_ddp(replica)
            awaiting = []
        others = self._begin_local(awaiting) if self._averages_every_pass else []
        torch.autograd.backward(self.precision.scale(loss), None, retain_graph, create_graph, inputs=inputs)
        if self._averages_every_pass:
            self._complete(awaiting, others)
        elif not awaiting:
            for replica in self._replicas.values():
                if replica.ddp is not None and replica.ddp.require_backward_grad_sync and not replica.is_local:
                    replica.has_local_gradients = True

    def finish_gradients(self, bundle: Bundle, factor: float | Tensor) -> None:
        """Average the gradients that DDP did not reduce, and multiply all by ``factor``."""
        if self._has_new_gradients:  # optimizers that step after one backward pass close the same window
            self._has_new_gradients = False
            self._closing = self._window.number
            self._window.number += 1
        for replica in self._replicas_of(bundle):
            if replica.is_local:
                continue
            is_reduced = replica.reduced_in_window == self._closing and not replica.has_local_gradients
            if not is_reduced or (replica.ddp is None and not self._averages_every_pass):
                owned = set(map(id, stepped_parameters(*bundle.optimizers)))
                self._average(replica, [value for value in replica.trainable() if id(value) in owned])
            elif replica.ddp is not None and not replica.is_checked:
                self._check_unused(replica)
            elif not replica.has_finished():
                self._stop_ddp(replica)
                self._average(replica, replica.parameters)
        multiply_gradients(bundle, factor)

    def describe(self) -> dict[str, Any]:
        """Return the options that differ from PyTorch's defaults."""
        names = {"find_unused_parameters", "bucket_cap_mb", "static_graph", "broadcast_buffers", "comm_hook"}
        return self.options.model_dump(include=names, exclude_defaults=True)

    def close(self) -> None:
        """Unwrap every model."""
        for replica in list(self._replicas.values()):
            self.unwrap(replica.model)

    def _begin_local(self, awaiting: list[_Replica]) -> list[tuple[_Replica, LocalGradients]]:
        """Return the replicas with parameters whose gradients DDP does not average in the pass that begins."""
        found: list[tuple[_Replica, LocalGradients]] = []
        for replica in self._replicas.values():
            if replica.is_local or not replica.is_trained:
                continue
            is_awaiting = any(replica is item for item in awaiting)
            if not (is_awaiting or replica.is_synced):
                replica.has_local_gradients = True
                continue
            parameters = replica.unfrozen() if is_awaiting else replica.trainable()
            if parameters:
                have_changed = replica.has_local_gradients
                found.append((replica, LocalGradients(self._comm, parameters, have_changed=have_changed)))
        return found

    def _complete(self, awaiting: list[_Replica], others: list[tuple[_Replica, LocalGradients]]) -> None:
        """Average the gradients that the backward pass has left different among ranks."""
        for replica in awaiting:
            replica.has_local_gradients = False
            if not replica.has_finished():
                self._await_messages()
                self._average(replica, replica.parameters)
        for replica, gradients in others:
            if gradients.average():
                replica.has_local_gradients = False
                replica.reduced_in_window = self._window.number

    def _has_reduced_parameter(self, model: nn.Module) -> bool:
        """Return whether DDP averages a parameter of the model for another model already.

        A gradient can be a view of one DDP object's bucket only.
        """
        reduced = {id(value) for replica in self._replicas.values() if replica.ddp for value in replica.parameters}
        return any(id(value) in reduced for value in model.parameters())

    def _replicas_of(self, bundle: Bundle) -> list[_Replica]:
        """Return the replicas whose parameters the bundle's optimizers step, cached for each bundle."""
        known = self._owners.get(id(bundle))
        if known is None or known[0] is not bundle:
            owned = set(map(id, stepped_parameters(*bundle.optimizers)))
            replicas = [
                replica
                for replica in self._replicas.values()
                if replica.is_trained and any(id(parameter) in owned for parameter in replica.model.parameters())
            ]
            known = self._owners[id(bundle)] = (bundle, replicas)
        return known[1]

    def _check_unused(self, replica: _Replica) -> None:
        """Check the first backward pass: if parameters got no gradient, make DDP search for unused ones in every pass.

        On one device unused parameters are no error. DDP alone would leave their whole bucket unaveraged, and raise
        only in the next pass. Averaging a second time changes nothing. If DDP has finished the pass, all parameters got
        gradients, and the user's code has removed those that are missing.
        """
        replica.is_checked = True
        unused = [] if replica.has_finished() else replica.unused_names()
        device = replica.parameters[0].device
        if not self._comm.all_reduce(torch.tensor(len(unused), device=device), "max"):
            return
        self._comm.barrier()  # messages that DDP has sent write into the gradients
        self._average(replica, replica.parameters)
        replica.find_unused_in_every_pass()
        if self._world.is_main:
            listed = ", ".join(unused[:3]) + (f" and {len(unused) - 3} more" if len(unused) > 3 else "")
            warn_at_user_line(
                f"in {type(replica.model).__name__}, {listed or 'on another rank some parameters'} took no part in the "
                "loss. Every step now looks for such parameters, which costs a little: set requires_grad=False on what "
                "is not trained, or --ddp.find-unused-parameters if it is meant"
            )

    def _stop_ddp(self, replica: _Replica) -> None:
        """Average the gradients of a replica before each step from now on, without DDP; every rank must call.

        Raises `MisuseError` if only some ranks call: their backward passes used other parameters than on the other
        ranks, and DDP waits for the missing gradients.
        """
        self._await_messages()
        replica.close()

    def _await_messages(self) -> None:
        """Wait until messages that DDP has sent have been written into the gradients, on all ranks."""
        try:
            self._comm.barrier(_ALL_RANKS_S)
        except RuntimeError as error:
            raise MisuseError(f"{_UNUSED} {_REMEDY}") from error

    @torch.no_grad()
    def _average(self, replica: _Replica, parameters: list[nn.Parameter]) -> None:
        """Average gradients over ranks; a missing gradient counts as zero if any rank has one."""
        replica.has_local_gradients = False
        for gradient in fill_missing_gradients(self._comm, parameters):
            self._comm.all_reduce(gradient, "mean")


@dataclass
class _Window:
    """The number of the accumulation window that is open."""

    number: int = 0


class _Replica:
    """One model and the DDP object that runs its calls; a model without trainable parameters has no DDP object."""

    def __init__(
        self,
        model: nn.Module,
        forward: Callable[..., Any],
        window: _Window,
        stop_ddp: Callable[[_Replica], None],
        options: DdpOptions | None,
        comm: Communicator,
        *,
        has_ddp: bool = True,
        is_of_plain_cell: bool = False,
    ) -> None:
        self.model = model
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
        # Backward passes average gradients.
        self.is_synced = True
        # A forward pass has prepared DDP to reduce the gradients of a backward pass.
        self.awaits_backward = False
        self._reached = ReachedParameters()
        # A call of the model has not ended.
        self.is_computing = False
        # Gradients are not averaged: the caller keeps the replicas equal.
        self.is_local = False
        # The last window with a forward pass that prepared DDP for a backward pass.
        self.reduced_in_window = -1
        self._window = window
        # DDP did not reduce the gradients of a backward pass that should have averaged them.
        self.has_local_gradients = False
        self.is_checked = options is None or options.find_unused_parameters or options.static_graph
        self.is_trained = options is not None
        # None also if DDP cannot reduce the model's gradients, or reduces some of them for another model: then all are
        # averaged before each step.
        self.ddp: DistributedDataParallel | None = None
        self._plain_forward = forward
        self._stop_ddp = stop_ddp
        self._options = options
        self._comm = comm
        self._is_of_plain_cell = is_of_plain_cell
        if options is not None and has_ddp:
            self._build(options, options.find_unused_parameters)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model: by DDP in training mode, directly otherwise, so that one rank may evaluate alone."""
        if self.is_local or self.ddp is None or not (self.model.training and torch.is_grad_enabled()):
            return self._plain_forward(*args, **kwargs)
        if is_in_transform():  # tensors that DDP makes would belong to the transform
            return self._plain_forward(*args, **kwargs)
        if self._is_of_plain_cell and is_in_other_thread():  # threads of several ranks take turns in different orders
            return self._plain_forward(*args, **kwargs)
        if not self.has_finished():
            self._stop_ddp(self)
            return self._plain_forward(*args, **kwargs)
        if self.ddp.require_backward_grad_sync:
            self.awaits_backward = True
            self.reduced_in_window = self._window.number
        self.is_computing = True
        try:
            output = self._ddp_forward(*args, **kwargs)
        finally:
            self.is_computing = False
        if self.awaits_backward and self.ddp is not None and self.ddp.find_unused_parameters:
            self._reached.add(output)
        return output

    def unfrozen(self) -> list[nn.Parameter]:
        """Return the parameters that have been unfrozen since the replica was made."""
        return [parameter for parameter in self._frozen if parameter.requires_grad]

    def trainable(self) -> list[nn.Parameter]:
        """Return the parameters that may get gradients."""
        return [*self.parameters, *self.unfrozen()]

    def unused_names(self) -> list[str]:
        """Return the trainable parameters that the last backward pass left without a gradient."""
        trainable = [(name, value) for name, value in self.model.named_parameters() if value.requires_grad]
        unused = [name for name, value in trainable if value.grad is None]
        return unused if len(unused) < len(trainable) else []

    def uses_unrecorded(self, loss: Tensor) -> bool:
        """Return whether a loss uses parameters that DDP has marked as unused."""
        if self.ddp is None or not self.ddp.find_unused_parameters:
            return False
        return self._reached.uses_unrecorded(loss, self.parameters)

    def has_finished(self) -> bool:
        """Return whether DDP has averaged all gradients that its latest forward pass prepared.

        False if only some parameters got gradients: with a loss of derivatives, as in physics-informed models, or with
        a backward pass for each output of a model.
        """
        if self.ddp is None:
            return True
        try:
            self.ddp._check_reducer_finalized()
        except RuntimeError:
            return False
        return True

    def find_unused_in_every_pass(self) -> None:
        """Replace the DDP object by one that looks for unused parameters; every rank must call.

        The values of the model are left as they are, because they are equal on all ranks, and a call of the model whose
        backward pass is still to come may have saved them.
        """
        assert self._options is not None, "a replica without options has no DDP"
        self.close()
        self._build(self._options, True, init_sync=False)

    def _build(self, options: DdpOptions, find_unused: bool, *, init_sync: bool = True) -> None:
        kind = LeanDdp if is_checked("ddp.forward") else DistributedDataParallel
        self.ddp = kind(
            _Shim(self.model, self._plain_forward),
            find_unused_parameters=find_unused,
            init_sync=init_sync,
            bucket_cap_mb=options.bucket_cap_mb,
            static_graph=options.static_graph,
            # The next backward pass overwrites gradients that are views of DDP's buckets and that the cell has kept.
            gradient_as_bucket_view=not self._is_of_plain_cell,
            **_buffer_option(options.broadcast_buffers),
        )
        if options.comm_hook != "no":
            register_hook(self.ddp, options)  # divides gradients as the hook of `average_buckets` does
        elif not options.static_graph:
            # Without a hook DDP divides gradients when they enter a bucket; with one, when the bucket is reduced. Then
            # gradients of a bucket that never fills are left unchanged, and are averaged afterwards.
            average_buckets(self.ddp, self._comm)
        self._ddp_forward = self.ddp.forward
        # DDP divides and sums a sparse gradient in place. An embedding shares its values with the gradient of its
        # output, and so with other embeddings.
        self._clones = [table.register_hook(_copy_gradient) for table in _sparse_tables(self.model)]

    def close(self) -> None:
        """Release DDP's reducer, whose hooks stay on the parameters for as long as it exists."""
        if self.ddp is not None:
            # A call that has not ended does not prepare the reducer for a backward pass.
            vars(self.ddp).update(reducer=None, logger=None, require_backward_grad_sync=False)
            self.ddp = None
            for handle in self._clones:
                handle.remove()


def _is_refused(model: nn.Module) -> bool:
    """Return whether DDP refuses a model, as one on the CPU with synchronized batch normalization."""
    is_on_host = any(value.is_cpu for value in model.parameters())
    return is_on_host and any(isinstance(part, nn.SyncBatchNorm) for part in model.modules())


_UNUSED = "Some parameters took no part in the loss on this worker, so their gradients cannot be averaged."
_REMEDY = (
    "Set ddp.find_unused_parameters (flag --ddp.find-unused-parameters) if that is meant, "
    "or set requires_grad=False on what is not trained before preparing."
)
# Seconds to wait for the other ranks; after that the backward pass counts as incomplete on this rank only.
_ALL_RANKS_S = 15.0


def _copy_gradient(gradient: Tensor) -> Tensor:
    return gradient.clone()


def _sparse_tables(model: nn.Module) -> Iterator[Tensor]:
    """Yield the trained parameters whose gradients are sparse."""
    for part in model.modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse and part.weight.requires_grad:
            yield part.weight


def _buffer_option(is_on: bool) -> dict[str, Any]:
    """Return the argument that switches the broadcast of buffers off, by the name that this version of torch uses."""
    if is_on:
        return {}
    names = inspect.signature(DistributedDataParallel.__init__).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers": False}


class _Shim(nn.Module):
    """The module that DDP wraps: it has the model's parameters, and calls its plain forward without hooks."""

    def __init__(self, model: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model
        self.forward = forward
