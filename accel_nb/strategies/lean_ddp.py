"""DistributedDataParallel with a forward pass that costs Python little.

torch's own labels each pass for the profiler, notes statistics, and asks in every pass what was settled when it was
built; that costs a small model as much as its layers. What has an effect on a replica on one device are five calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel


class LeanDdp(DistributedDataParallel):
    """Averages gradients of the parameters of ``module``, and computes by calling ``module.forward`` without hooks.

    Call `forward` with gradients on. Where torch has more to do (the first pass, unused parameters, a static graph) or
    a profiler listens, torch's own forward pass runs.
    """

    _plain_forward: Callable[..., Any]

    def __init__(self, module: torch.nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        self._plain_forward = module.forward
        self._is_simple = not (
            self.find_unused_parameters
            or self.static_graph
            or self.device_ids
            or self.mixed_precision is not None
            or self._use_python_reducer
            or self._delay_all_reduce_all_params
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute ``module.forward`` and make the reducer wait for a backward pass, if that is to be averaged."""
        if not (self._is_simple and self._lazy_init_ran) or torch.autograd._profiler_enabled():  # pyright: ignore[reportPrivateImportUsage]
            return super().forward(*args, **kwargs)
        reducer, is_averaged = self.reducer, self.require_backward_grad_sync
        if is_averaged:
            reducer.prepare_for_forward()
        if reducer._rebuild_buckets():
            self._has_rebuilt_buckets = True
        if self.will_sync_module_buffers():
            self._sync_buffers()
        outer = DistributedDataParallel._active_ddp_module  # torch.compile asks for it
        DistributedDataParallel._active_ddp_module = self
        try:
            output = self._plain_forward(*args, **kwargs)
        finally:
            DistributedDataParallel._active_ddp_module = outer
        self.require_forward_param_sync = is_averaged
        if is_averaged:
            reducer.prepare_for_backward([])
        return output
