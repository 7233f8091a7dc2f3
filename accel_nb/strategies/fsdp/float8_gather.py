"""All-gather of the weights of float8 layers in float8: half the bytes of bf16 between ranks.

`fully_shard` calls the methods ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather`` of the tensor that holds a rank's
shard of a parameter; here they are attributes of that tensor. So weights stay plain tensors of their own dtype for
optimizers, checkpoints and copies, and only the gathered weight of a layer's multiplication is torchao's float8 tensor.
All shards of a weight share one scale, which needs the largest value of all ranks: one collective for all weights, when
the model is called.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from accel_nb.precision.fp8 import WeightCasting, get_weight_casting
from accel_nb.runtime.distributed.communicator import Communicator
from accel_nb.runtime.torch_private import is_checked


class Float8Gather:
    """The weights of one sharded model that are gathered in float8; every rank makes one, and makes the same calls.

    ``params`` are the `FSDPParam`s of the model. Weights that other modules than float8 layers use are left out.
    """

    def __init__(self, params: Iterable[Any], comm: Communicator) -> None:
        self._comm = comm
        self._weights: list[tuple[Any, WeightCasting]] = [
            (param, casting) for param in params if (casting := _casting_for(param)) is not None
        ]
        self._scales: list[Tensor] = []
        self._depth = 0
        for number, (param, casting) in enumerate(self._weights):
            self._extend(number, param, casting)

    def __len__(self) -> int:
        return len(self._weights)

    def with_scales(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that computes the scales of the weights, then calls ``function``."""

        @wraps(function)
        def with_scales(*args: Any, **kwargs: Any) -> Any:
            with self.computing_scales():
                return function(*args, **kwargs)

        return with_scales

    @contextmanager
    def computing_scales(self) -> Iterator[None]:
        """Compute the scales, unless an outer call, or the forward pass of this backward pass, has computed them."""
        if not self._depth and torch._C._current_graph_task_id() == -1:
            self._find_scales()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def undo(self) -> None:
        """Make `fully_shard` gather the weights in their own dtype again."""
        for param, _ in self._weights:
            names = vars(param._sharded_local_tensor)
            names.pop("fsdp_pre_all_gather", None)
            names.pop("fsdp_post_all_gather", None)

    @torch.no_grad()
    def _find_scales(self) -> None:
        if self._weights:  # shards of equal size: a rank with fewer rows has zeros in the rest
            shards = [param._sharded_param_data for param, _ in self._weights]
            if is_checked("foreach"):
                norms = torch._foreach_norm(shards, math.inf)  # pyright: ignore[reportPrivateImportUsage]
            else:
                norms = [torch.linalg.vector_norm(shard, math.inf) for shard in shards]
            largest = torch.stack(tuple(norms))
            self._scales = list(self._weights[0][1].scales(self._comm.all_reduce(largest, "max")))

    def _extend(self, number: int, param: Any, casting: WeightCasting) -> None:
        def fsdp_pre_all_gather(
            mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
        ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
            scale = self._scales[number]
            shard = param._sharded_param_data.view(param.padded_sharded_param_size)
            return (casting.cast(shard, scale).view(torch.uint8),), (scale,)  # as bytes, which every backend can send

        def fsdp_post_all_gather(
            outputs: tuple[Tensor, ...], scales: tuple[Tensor, ...], dtype: torch.dtype, *, out: Any = None
        ) -> Any:
            if out is not None:
                out._scale = scales[0]
                return None
            gathered = outputs[0].view(casting.dtype)
            return casting.to_float8_tensor(gathered, scales[0], dtype), (gathered,)

        held = param._sharded_local_tensor
        held.fsdp_pre_all_gather = fsdp_pre_all_gather
        held.fsdp_post_all_gather = fsdp_post_all_gather
        param._init_extensions()  # `fully_shard` read the attributes when it made ``param``


def _casting_for(param: Any) -> WeightCasting | None:
    info = param._module_info
    users = [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)]
    if any(name != "weight" or get_weight_casting(module) is None for module, name in users):
        return None
    return get_weight_casting(info.module)
