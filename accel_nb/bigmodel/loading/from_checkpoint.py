"""Planning, loading and dispatching of a model in one call (`load`), and a report of the memory (`forecast`)."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from accel_nb.bigmodel.loading.bnb import BnbQuantizationConfig
from accel_nb.bigmodel.loading.load import load_checkpoint_and_dispatch
from accel_nb.bigmodel.loading.quantized_files import replace_quantized_layers
from accel_nb.bigmodel.meta import init_empty_weights
from accel_nb.bigmodel.planning.cost_model import Pace
from accel_nb.bigmodel.planning.device_map import estimate_forward, main_device, plan_device_map
from accel_nb.bigmodel.planning.forward_cost import ForwardCost, measure_forward_cost, measure_speed
from accel_nb.bigmodel.planning.placement import Placement, describe_device_map, find_place
from accel_nb.bigmodel.planning.sizes import (
    Device,
    device_problems,
    list_tensors,
    parse_dtype,
    to_torch_device,
)
from accel_nb.bigmodel.quantization.kernels import Quantization
from accel_nb.bigmodel.quantization.quantize import quantize_model, quantized_layers, report_quantization
from accel_nb.bigmodel.safetensors_reader import open_safetensors
from accel_nb.config.byte_sizes import size_text
from accel_nb.errors import ConfigError


def load(
    checkpoint: str | os.PathLike[str],
    model_class: Callable[..., nn.Module] | None = None,
    *,
    builder: Callable[[], nn.Module] | None = None,
    config: Mapping[str, object] | None = None,
    device_map: str | Mapping[str, Device] = "auto",
    max_memory: Mapping[Device, int | str] | None = None,
    no_split_module_classes: Sequence[str] | str | None = None,
    dtype: torch.dtype | str | None = None,
    example: tuple[Any, ...] | None = None,
    activations: int | str | None = None,
    kv_cache: int | str | None = None,
    pace: Pace | None = None,
    buffer_bytes: int | str | None = None,
    quantization: str | Quantization | BnbQuantizationConfig | None = None,
    strict: bool = False,
    verbose: bool = True,
    on_progress: Callable[[int, int], None] | None = None,
) -> nn.Module:
    """Build a model on the meta device, plan the placement of its weights, load them, and return it in evaluation mode.

    Either ``model_class`` is called with ``config`` as keyword arguments, or ``builder`` without any. ``verbose`` shows
    the forecast before anything is loaded: as bars in a notebook, else as a table. ``example`` has the arguments of a
    forward, with the batch size and length to plan for: the forward runs on fake tensors, and memory is reserved for
    its activations, and for keys and values of each block (``activations``, ``kv_cache``: explicit sizes in bytes). If
    the model does not fit, the speed of the device and of transfers is measured for some milliseconds (``pace``:
    explicit values, see `infer_auto_device_map`), and parts are placed so that such a forward takes the least time.
    ``quantization`` (``int8``, ``int4``, ...: see `Quantization`) quantizes linear layers one at a time while they are
    loaded; it is not needed for a checkpoint that is stored quantized. For the other arguments see
    `load_checkpoint_and_dispatch`. Raises `ConfigError` with all problems.
    """
    model = _build_empty(model_class, builder, config)
    was_quantized = replace_quantized_layers(model, checkpoint)
    kept: Sequence[str] = ()
    if quantization is not None:
        if was_quantized:
            raise ConfigError(f"{checkpoint} holds quantized weights already; leave quantization out")
        if isinstance(quantization, BnbQuantizationConfig):
            dtype, kept = dtype or quantization.dtype, quantization.keep_in_fp32_modules or ()
            quantization.quantize(model, dtype)
        else:
            quantize_model(model, quantization, dtype=dtype)
    cost = None if example is None else measure_forward_cost(model, example, dtype=dtype)
    flops = {} if cost is None else cost.flops_by_module

    def plan(pace: Pace | None) -> Mapping[str, Device]:
        if not isinstance(device_map, str):
            return device_map
        return plan_device_map(
            model,
            device_map,
            max_memory,
            no_split_module_classes,
            dtype,
            activations=_first_given(activations, cost and cost.activations),
            kv_cache=_first_given(kv_cache, cost and cost.kv_cache),
            pace=pace,
            flops=flops,
        )

    places = plan(pace)
    if pace is None and cost is not None and any(_count_offloaded_bytes(model, places, dtype).values()):
        pace = _measure_speed(model, places, checkpoint, dtype)
        places = plan(pace)
    if verbose:
        more = [] if cost is None else [_describe(cost)]
        if any(_count_offloaded_bytes(model, places, dtype).values()):
            own = pace or Pace.typical(main_device(places.values()))
            expected = estimate_forward(model, places, own, dtype, no_split_module_classes, flops=flops)
            more.append(f"{expected}{'' if pace else ' (on typical hardware; an example= is measured)'}")
        forecast(model, places, max_memory=max_memory, dtype=dtype, notes=more).show()
    load_checkpoint_and_dispatch(
        model,
        checkpoint,
        places,
        dtype=dtype,
        preload_module_classes=_as_list(no_split_module_classes),
        buffer_bytes=buffer_bytes,
        keep_in_fp32_modules=kept,
        strict=strict,
        on_progress=on_progress,
    )
    if verbose and quantized_layers(model):
        print(report_quantization(model))
    return model.eval()


def _build_empty(
    model_class: Callable[..., nn.Module] | None,
    builder: Callable[[], nn.Module] | None,
    config: Mapping[str, object] | None,
) -> nn.Module:
    """Return a model on the meta device, of a class or a builder; see `load`."""
    if (model_class is None) == (builder is None):
        given = "neither is given" if builder is None else "both are given"
        raise ConfigError(
            f"{given}: load builds the model with model_class=YourModel (and config={{...}} for its arguments) or with "
            "builder=lambda: YourModel(...); a checkpoint holds tensors and no code"
        )
    if builder is not None and config is not None:
        raise ConfigError("config is only for model_class; a builder is called without arguments")
    with init_empty_weights():
        model = builder() if builder is not None else model_class(**(config or {})) if model_class is not None else None
    if not isinstance(model, nn.Module):
        raise ConfigError(f"load built a {type(model).__name__}, which is not a torch module")
    return model


def forecast(
    model: nn.Module,
    device_map: Mapping[str, Device],
    *,
    max_memory: Mapping[Device, int | str] | None = None,
    dtype: torch.dtype | str | None = None,
    notes: Sequence[str] = (),
) -> Placement:
    """Return the report of the weights on each device; its first notes are the bytes that each forward moves."""
    main = main_device(device_map.values())
    away = _count_offloaded_bytes(model, device_map, dtype)
    moves = [
        f"each forward moves {size_text(away[place])} from {name} to {main}"
        for place, name in (("disk", "disk"), ("cpu", "memory"))
        if away[place]
    ]
    return describe_device_map(model, device_map, max_memory=max_memory, dtype=dtype, notes=[*moves, *notes])


def _count_offloaded_bytes(
    model: nn.Module, device_map: Mapping[str, Device], dtype: torch.dtype | str | None
) -> dict[str, int]:  # fmt: skip
    """Return the bytes that each forward moves from ``disk``, and from host memory (``cpu``)."""
    main = main_device(device_map.values())
    away = {"disk": 0, "cpu": 0}
    for tensor in list_tensors(model, dtype):
        place = str(find_place(tensor.name, device_map))
        if not tensor.is_buffer and (place == "disk" or (place == "cpu" and main != "cpu")):
            away[place] += tensor.nbytes
    return away


def _describe(cost: ForwardCost) -> str:
    """Describe the memory and operations of the example's forward."""
    return (
        f"the example needs {size_text(cost.activations)} of activations, {size_text(cost.kv_cache)} of keys "
        f"and values per block, {cost.flops / 1e9:.3g} GFLOP"
    )


def _measure_speed(
    model: nn.Module,
    places: Mapping[str, Device],
    checkpoint: str | os.PathLike[str],
    dtype: torch.dtype | str | None,
) -> Pace | None:
    """Measure the speed of the main device and of transfers to it; None if this machine has no such device."""
    main = main_device(places.values())
    if device_problems(main, "device_map", must_exist=True):
        return None
    own = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    return measure_speed(
        open_safetensors(checkpoint), to_torch_device(main), own if dtype is None else parse_dtype(dtype)
    )


def _first_given(*sizes: int | str | None) -> int | str:
    return next((size for size in sizes if size is not None), 0)


def _as_list(names: Sequence[str] | str | None) -> Sequence[str] | None:
    return [names] if isinstance(names, str) else names
