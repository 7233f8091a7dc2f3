"""Check on the first batches of a plain cell whether its losses can be computed from shares of a batch.

A loss is *proven* if the trace of its operations shows that it is a sum or a mean over samples. For one that is not,
the cell shows one warning, at the line that calls backward. Only rank 0 checks, without communication.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.data import DataLoader

from accel_nb.accelerator.core import Accelerator
from accel_nb.accelerator.plain_cells.cell_warnings import (
    warn_changed_buffers,
    warn_gradient_hooks,
    warn_random_numbers,
    warn_unproven_loss,
)
from accel_nb.accelerator.plain_cells.detection.model_hooks import has_gradient_hooks
from accel_nb.accelerator.plain_cells.detection.module_calls import Forward, ModuleCallHooks
from accel_nb.accelerator.plain_cells.loss_proof.trace import LossTrace
from accel_nb.data.loader import is_sharded, watch_batches
from accel_nb.data.order import BatchShare
from accel_nb.runtime import rng

_MAX_BATCHES = 50
_NO_KINDS: frozenset[type] = frozenset()


class LossCheck:
    """Traces the first batch of each loop of a cell, and further batches until each kind of loss was traced once."""

    def __init__(self, accelerator: Accelerator, calls: ModuleCallHooks) -> None:
        self._accelerator = accelerator
        self._stepper = accelerator.components.stepper
        self._calls = calls
        self._trace: LossTrace | None = None
        self._is_on = False
        # The kinds of losses (types of their autograd nodes) that need no check; empty while a batch is traced.
        self.checked_kinds: Set[type] = _NO_KINDS
        self._kinds: set[type] = set()
        # Whether the next batch is the first one of a loop, which is traced.
        self._is_new_loop = False
        # Kinds of losses that occurred only in batches without a trace, and how many more batches may be traced.
        self._missing: set[type] = set()
        self._num_left = 0
        # The traced loops: their code, their loader and the bundle of prepared objects at that time.
        self._loops: list[tuple[Any, weakref.ref[Any], weakref.ref[Any]]] = []
        self._watched: list[DataLoader[Any]] = []
        self._warned: set[str] = set()
        self._has_hooks = False
        # Digest of the random states when the traced batch was delivered.
        self._digest: str | None = None

    def begin(self) -> None:
        """Reset for a new cell."""
        self._is_on = self._stepper.world.size > 1 and self._accelerator.is_main_process
        self._kinds, self._missing = set(), set()
        self._loops.clear()
        self._warned.clear()
        self._has_hooks = self._is_new_loop = False
        self.checked_kinds = self._kinds

    def end(self) -> None:
        """Stop tracing; warn if a kind of loss occurred in no traced batch."""
        self._stop()
        self._unwatch()
        if self._missing:
            warn_unproven_loss(self._accelerator, "it occurred in too few batches to trace it")

    def trace_loop(self, code: Any, loader: DataLoader[Any]) -> None:
        """Trace the first batch of a loop that is about to begin, which is identified by its code and loader.

        Further epochs of the loop are traced only if objects were prepared since, as in a search over models.
        """
        self._stop()
        bundle = self._stepper.bundle
        was_traced = any(loop[0] is code and loop[1]() is loader and loop[2]() is bundle for loop in self._loops)
        if self._is_on and not was_traced:
            self._loops.append((code, weakref.ref(loader), weakref.ref(bundle)))
            self._is_new_loop = True
            self._watch([loader])

    def record_hook(self) -> None:
        """Record that the cell has registered a hook on the gradient of a tensor."""
        self._has_hooks = True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Suspend tracing inside of the block."""
        if self._trace is None:
            yield
            return
        with self._trace.paused():
            yield

    def check_loss(self, loss: Tensor, problem: str | None = None) -> None:
        """Warn if a loss of a backward call is not proven, or depends on hooks, random numbers or buffers.

        ``problem`` is the reason, if it is known, why the loss is not proven.
        """
        kind, share = type(loss.grad_fn), self._stepper.window.share
        self._kinds.add(kind)
        if share is None or not self._is_on or share.is_whole:
            return
        if self._trace is None:
            self._missing.add(kind)
            self._num_left = _MAX_BATCHES
            self._watch([item for item in self._accelerator.prepared_objects if isinstance(item, DataLoader)])
            return
        self._missing.discard(kind)
        with self._trace.paused():
            self._warn_of_hooks()
            self._warn_of_draws()
            if self._trace.has_changed_buffers:
                self._report("the model changes buffers", warn_changed_buffers)
            if problem is None:
                problem = self._trace.explain_unproven(loss, self._stepper.classify_loss(loss))
            if problem is not None:
                self._report(
                    f"the loss mixes samples: {problem}", lambda accelerator: warn_unproven_loss(accelerator, problem)
                )

    def _report(self, problem: str, warn: Callable[[Accelerator], None]) -> None:
        """Warn of a problem once in each cell."""
        if problem not in self._warned:
            self._warned.add(problem)
            warn(self._accelerator)

    def _on_batch(self, batch: Any, share: BatchShare) -> None:
        """Stop tracing the previous batch, and trace the batch that is about to be delivered, if needed."""
        if self._trace is not None:
            self._warn_of_draws()
        self._stop()
        if not (self._is_new_loop or (self._missing and self._num_left)):
            self._unwatch()
            return
        if share.num_samples < 2:
            return
        self._is_new_loop = False
        self._num_left = max(self._num_left - 1, 0)
        self._trace = LossTrace(batch, share.num_samples)
        self._digest = self._random_states()
        self.checked_kinds = _NO_KINDS
        # The calls of these models are not traced inside. Those of modules without weights or buffers, such as most of
        # torch's losses, are.
        roots = {id(model) for model in self._stepper.bundle.models if _has_tensors(model)}
        trace = self._trace

        def around(original: Forward, module: nn.Module, args: Any, kwargs: Any) -> Any:
            return (
                trace.call_model(original, module, args, kwargs)
                if id(module) in roots
                else original(module, *args, **kwargs)
            )

        self._calls.set_around(around)
        trace.start()

    def _stop(self) -> None:
        if self._trace is not None:
            self._trace.stop()
            self._trace = None
            self._calls.set_around(None)
        self.checked_kinds = self._kinds

    def _watch(self, loaders: Iterable[DataLoader[Any]]) -> None:
        for loader in loaders:
            watch_batches(loader, self._on_batch)
            self._watched.append(loader)

    def _unwatch(self) -> None:
        for loader in filter(is_sharded, self._watched):
            watch_batches(loader, None)
        self._watched.clear()
        self._is_new_loop = False

    def _warn_of_draws(self) -> None:
        """Warn if random numbers were drawn since the batch was delivered, unless the model has active dropout."""
        if self._digest is None or self._random_states() == self._digest:
            return
        self._digest = None
        modules = (part for model in self._stepper.bundle.models for part in model.modules())
        if not any(isinstance(part, _DropoutNd) and part.p > 0 and part.training for part in modules):
            self._report("random numbers are drawn for each batch", warn_random_numbers)

    def _random_states(self) -> str:
        """Return a digest that changes when a random number is drawn, on the CPU or on this rank's device."""
        device_states = rng.capture(self._accelerator.device, parts=()).values()
        return rng.digest(rng.capture_cpu()) + "".join(str(hash(state.numpy().tobytes())) for state in device_states)

    def _warn_of_hooks(self) -> None:
        if self._has_hooks or any(has_gradient_hooks(model) for model in self._stepper.bundle.models):
            self._report("hooks read or change gradients", warn_gradient_hooks)


def _has_tensors(model: nn.Module) -> bool:
    return any(
        value is not None for part in model.modules() for value in (*part._parameters.values(), *part._buffers.values())
    )
