"""DistributedDataParallel with a forward pass of little Python overhead.

torch's own forward pass labels each pass for the profiler, collects statistics, and checks in every pass conditions
that were fixed when the object was made; for a small model that takes as long as its layers. Five of its calls have an
effect on a replica on one device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from accel_nb.runtime.tensors.overlap import has_overlap, without_repeats


class LeanDdp(DistributedDataParallel):
    """Averages gradients of the parameters of ``module``, and computes by calling ``module.forward`` without hooks.

    Call `forward` with gradients enabled. In the first pass, with unused parameters or a static graph, or under a
    profiler, torch's own forward pass runs. The class uses private names of torch: see `torch_private`.
    """

    _plain_forward: Callable[..., Any]

    def __init__(self, module: torch.nn.Module, *, init_sync: bool = True, **options: Any) -> None:
        named = [*module.named_parameters(), *module.named_buffers()]
        # torch's broadcast cannot write into tensors with overlapping memory. Neither can an optimizer, which raises an
        # error for a trained one. Nor can it copy sparse ones, such as the adjacency matrix of a graph.
        fixed = [(name, value) for name, value in named if not value.requires_grad]
        sparse = {name for name, value in fixed if value.layout is not torch.strided}
        self._overlapping = {name for name, value in fixed if name not in sparse and has_overlap(value)}
        if ignored := self._overlapping | sparse:
            module._ddp_params_and_buffers_to_ignore = ignored  # type: ignore[assignment]
        super().__init__(module, init_sync=init_sync, **options)
        if self._overlapping and init_sync:
            views = [without_repeats(value.detach()) for name, value in named if name in self._overlapping]
            self._distributed_broadcast_coalesced(views, self.broadcast_bucket_size)
        self._plain_forward = module.forward
        self._is_simple = not (
            self.find_unused_parameters
            or self.static_graph
            or self.device_ids
            or self.mixed_precision is not None
            or self._use_python_reducer
            or self._delay_all_reduce_all_params
        )

    def _assign_modules_buffers(self) -> None:
        """Collect the buffers to broadcast, as torch does before each forward pass.

        Those made in ``torch.inference_mode`` are left out: no training pass can write into them.
        """
        super()._assign_modules_buffers()
        self.modules_buffers = [value for value in self.modules_buffers if not value.is_inference()]
        if self._overlapping:
            buffers = dict(self.module.named_buffers())
            self.modules_buffers += [without_repeats(buffers[name]) for name in self._overlapping & buffers.keys()]

    def _sync_buffers(self) -> None:
        """Copy the buffers of rank 0 without increasing their version counters, as torch does from 2.13 on.

        An earlier call of the model may have saved the buffers for its backward pass.
        """
        buffers = tuple(self.modules_buffers)
        with torch.autograd._unsafe_preserve_version_counter(buffers):  # pyright: ignore[reportPrivateImportUsage]
            super()._sync_buffers()

    def _distributed_broadcast_coalesced(self, tensors: Any, buffer_size: int, authoritative_rank: int = 0) -> None:
        """Broadcast buffers, unless the model's last one was removed, for which torch raises an error."""
        if tensors:
            super()._distributed_broadcast_coalesced(tensors, buffer_size, authoritative_rank)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute ``module.forward``, and prepare the reducer for a backward pass if that averages gradients."""
        if not (self._is_simple and self._lazy_init_ran) or torch.autograd._profiler_enabled():  # pyright: ignore[reportPrivateImportUsage]
            return super().forward(*args, **kwargs)
        # No local variable holds the reducer: the traceback of an interrupt would keep it, and its hooks, alive.
        is_averaged = self.require_backward_grad_sync
        if is_averaged:
            self.reducer.prepare_for_forward()
        if self.reducer._rebuild_buckets():
            self._has_rebuilt_buckets = True
        if self.will_sync_module_buffers():
            self._sync_buffers()
        outer = DistributedDataParallel._active_ddp_module  # torch.compile reads it
        DistributedDataParallel._active_ddp_module = self
        try:
            output = self._plain_forward(*args, **kwargs)
        finally:
            DistributedDataParallel._active_ddp_module = outer
        self.require_forward_param_sync = is_averaged
        if is_averaged and self.reducer is not None:  # a model that trains itself in its forward pass has released it
            self.reducer.prepare_for_backward([])
        return output
