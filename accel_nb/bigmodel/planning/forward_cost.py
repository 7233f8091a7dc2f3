"""Measurement of a forward's memory and operations on fake tensors, and of the speed of a device."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from accel_nb.bigmodel.planning.cost_model import Pace
from accel_nb.bigmodel.planning.sizes import parse_dtype
from accel_nb.bigmodel.safetensors_reader import CHUNK_BYTES, SafetensorsCheckpoint
from accel_nb.errors import ConfigError
from accel_nb.runtime.devices.registry import device_type
from accel_nb.runtime.tensors.nested import find_tensors, map_tensors

_PROBE_BYTES = 64 << 20
_PROBE_WIDTH = 1024


@dataclass(frozen=True)
class ForwardCost:
    """Memory and operations of one forward without gradients; sizes in bytes."""

    activations: int
    """Peak of the intermediate tensors."""
    kv_cache: int
    """Keys and values of one attention, of which a KV cache holds one per block."""
    flops: int
    """Floating-point operations of matrix products, attention and convolutions."""
    flops_by_module: Mapping[str, int] = field(default_factory=dict)
    """Floating-point operations of each module, by name."""


def measure_forward_cost(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    dtype: torch.dtype | str | None = None,
) -> ForwardCost:
    """Run a model on fake tensors and return the memory and operations of a forward with these arguments.

    The model may be on the meta device. ``dtype`` is the dtype of the weights (None: as in the model). Keys and values
    are measured where a model calls ``scaled_dot_product_attention``. Raises `ConfigError` if the control flow of the
    model depends on values.
    """
    weight_dtype = None if dtype is None else parse_dtype(dtype)
    live_bytes, attention_recorder = _LiveBytes(), _AttentionRecorder()
    counter = FlopCounterMode(display=False)
    try:
        with torch.no_grad(), FakeTensorMode():

            def fake(tensor: Tensor) -> Tensor:
                resolved_dtype = (
                    weight_dtype if weight_dtype is not None and tensor.is_floating_point() else tensor.dtype
                )
                return torch.empty(tensor.shape, dtype=resolved_dtype, device="cpu")

            state: dict[str, Tensor] = {}
            fake_tensors: dict[int, Tensor] = {}
            for named in (model.named_parameters, model.named_buffers):
                for name, tensor in named(remove_duplicate=False):
                    state[name] = fake_tensors.setdefault(id(tensor), fake(tensor))
            fake_args, fake_kwargs = map_tensors(
                lambda t: torch.empty(t.shape, dtype=t.dtype, device="cpu"), (args, dict(kwargs or {}))
            )
            with live_bytes, counter, attention_recorder:
                functional_call(model, state, fake_args, fake_kwargs)
    except Exception as error:
        raise ConfigError(
            f"the memory of a forward of {type(model).__name__} cannot be measured without values: {error}; give "
            "activations= and kv_cache= in bytes instead of an example"
        ) from error
    root = type(model).__name__
    flops_by_module = {
        name.removeprefix(root).removeprefix("."): sum(counts.values())
        for name, counts in counter.get_flop_counts().items()
        if name == root or name.startswith(f"{root}.")
    }
    return ForwardCost(live_bytes.peak, attention_recorder.max_nbytes, counter.get_total_flops(), flops_by_module)


def measure_speed(checkpoint: SafetensorsCheckpoint, device: torch.device, dtype: torch.dtype) -> Pace:
    """Measure the speed of reading a checkpoint's largest tensor, of copies to a device, and of matrix products."""
    source = max(checkpoint.tensors.values(), key=lambda tensor: tensor.nbytes)
    nbytes = max(1, min(source.nbytes, _PROBE_BYTES) // CHUNK_BYTES) * min(source.nbytes, CHUNK_BYTES)
    buffer = torch.zeros(
        min(nbytes, CHUNK_BYTES), dtype=torch.uint8, pin_memory=device_type(device).pins_memory, device="cpu"
    )
    count = buffer.nbytes // source.dtype.itemsize
    is_cached = source.is_in_memory()

    def read() -> None:
        for begin in range(0, nbytes // source.dtype.itemsize, count):
            source.slice(begin, count).read_into(buffer[: count * source.dtype.itemsize].view(source.dtype))

    disk_rate = nbytes / _seconds(read)
    device_rate = disk_rate
    if not device_type(device).is_host:
        on_device = torch.empty_like(buffer, device=device)
        device_rate = buffer.nbytes / _seconds(lambda: on_device.copy_(buffer)[0].item(), warm_up=True)
    matrix = torch.ones(_PROBE_WIDTH, _PROBE_WIDTH, dtype=dtype, device=device)
    table = torch.ones(_PROBE_BYTES // dtype.itemsize // _PROBE_WIDTH, _PROBE_WIDTH, dtype=dtype, device=device)
    # `.item()` waits until the device has computed.
    matmul_s = _seconds(lambda: (matrix @ matrix)[0, 0].item(), warm_up=True)
    matvec_s = _seconds(lambda: (table @ matrix[0])[0].item(), warm_up=True)
    return Pace(
        flops_per_s=2 * _PROBE_WIDTH**3 / matmul_s,
        memory_bytes_per_s=table.nbytes / matvec_s,
        cpu_bytes_per_s=device_rate,
        disk_bytes_per_s=min(disk_rate, device_rate),
        reads_beside=not device_type(device).is_host or not is_cached,
    )


def _seconds(run: Callable[[], object], *, warm_up: bool = False) -> float:
    """Return the duration of a call in seconds; with ``warm_up``, of the second of two calls."""
    if warm_up:
        run()
    started = time.perf_counter()
    run()
    return max(time.perf_counter() - started, 1e-9)


@dataclass
class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that operations allocate, as long as a tensor references them."""

    peak: int = 0
    _now: int = 0
    _sizes: dict[int, int] = field(default_factory=dict)
    _users: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        input_storages = {tensor.untyped_storage()._cdata for tensor in find_tensors((args, kwargs or {}))}
        output = func(*args, **(kwargs or {}))
        for tensor in find_tensors(output):
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in input_storages and key not in self._sizes:
                continue  # a view of a weight or an input
            if key not in self._sizes:
                self._sizes[key] = storage.nbytes()
                self._now += storage.nbytes()
                self.peak = max(self.peak, self._now)
            self._users[key] = self._users.get(key, 0) + 1
            weakref.finalize(tensor, self._remove_user, key)
        return output

    def _remove_user(self, key: int) -> None:
        self._users[key] -= 1
        if not self._users[key]:
            del self._users[key]
            self._now -= self._sizes.pop(key)


class _AttentionRecorder(TorchFunctionMode):
    """Records the size of the keys and values of the largest attention."""

    def __init__(self) -> None:
        super().__init__()
        self.max_nbytes = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            given = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
            self.max_nbytes = max(self.max_nbytes, given["key"].nbytes + given["value"].nbytes)
        return func(*args, **kwargs)
