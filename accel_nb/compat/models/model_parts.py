"""Parts of models, with accelerate's names: compiled blocks, wrappers, names of objects, saved files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from accel_nb.accelerator.process.logging import get_logger
from accel_nb.checkpoint.export import copy_if_shared, drop_tied_duplicates
from accel_nb.compat.deepspeed.engine import DeepSpeedEngine
from accel_nb.errors import MisuseError
from accel_nb.runtime.tensors.instance_patching import plain_view

_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel, DeepSpeedEngine)


def is_compiled_module(module: nn.Module) -> bool:
    """Return whether a module is the result of ``torch.compile(module)``; a prepared model that compiles is not."""
    return isinstance(module, torch._dynamo.OptimizedModule) if hasattr(module, "_orig_mod") else False


def extract_model_from_parallel(
    model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> Any:
    """Return the model inside of a wrapper of parallel training or torch.compile, without changes by `prepare`."""
    compiled = model if is_compiled_module(model) else None
    model = model._orig_mod if compiled is not None else model
    while isinstance(model, _WRAPPERS):
        model = model.module
    if recursive:
        for name, child in model.named_children():
            setattr(model, name, extract_model_from_parallel(child, keep_fp32_wrapper, keep_torch_compile, recursive))
    if not keep_fp32_wrapper:
        model = _without_conversion(plain_view(model) if isinstance(model, nn.Module) else model)
    if compiled is None or not keep_torch_compile:
        return model._orig_mod if compiled is None and not keep_torch_compile and is_compiled_module(model) else model
    if is_compiled_module(model):
        return model
    compiled._orig_mod = model
    return compiled


def _without_conversion(model: Any) -> Any:
    """Undo `convert_outputs_to_fp32` on the model's forward."""
    original = model.__dict__.pop("_original_forward", None)
    if original is None:
        return model
    forward = model.__dict__.get("forward")
    while forward is not None and hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
        if forward == original:
            break
    if getattr(forward, "__func__", None) is type(model).forward:
        del model.__dict__["forward"]
    else:
        model.forward = original
    return model


def has_compiled_regions(module: nn.Module) -> bool:
    """Return whether a part of a module is compiled."""
    return any(is_compiled_module(part) for part in module.modules())


def is_repeated_blocks(module: nn.Module) -> bool:
    """Return whether a module is a list of modules of one class."""
    return isinstance(module, nn.ModuleList) and len({type(part) for part in module}) == 1


def has_repeated_blocks(module: nn.Module) -> bool:
    """Return whether a module contains lists of modules of one class."""
    return any(is_repeated_blocks(part) for part in module.modules())


def compile_regions(module: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """Compile each repeated block of a module, in place, or the whole module if it has none; return it."""
    if is_repeated_blocks(module):
        for index, part in enumerate(module.children()):
            setattr(module, str(index), torch.compile(part, **compile_kwargs))
        return module
    if not has_repeated_blocks(module):
        return torch.compile(module, **compile_kwargs)  # pyright: ignore[reportReturnType]
    for name, part in list(module.named_children()):
        if has_repeated_blocks(part):
            setattr(module, name, compile_regions(part, **compile_kwargs))
    return module


def compile_regions_deepspeed(module: nn.Module, **compile_kwargs: Any) -> None:
    """Compile each repeated block of a module in place, without replacing it."""
    whole = True
    for part in module.modules():
        if is_repeated_blocks(part):
            whole = False
            for block in part.children():
                block.compile(**compile_kwargs)
    if whole:
        module.compile(**compile_kwargs)


def get_module_children_bottom_up(model: nn.Module, return_fqns: bool = False) -> list[Any]:
    """Return a model's modules, the deepest first and the model last; optionally with their names."""
    levels = sorted(model.named_modules(), key=lambda entry: -(entry[0].count(".") + 1 if entry[0] else 0))
    return [entry if return_fqns else entry[1] for entry in levels]


def get_module_class_from_name(module: nn.Module, name: str) -> type[nn.Module] | None:
    """Return the class of that name among the modules of a model."""
    return next((type(part) for part in module.modules() if type(part).__name__ == name), None)


def get_parameters_from_modules(
    modules: Iterable[nn.Module] | str | None, model: nn.Module, device: torch.device | str | int
) -> set[nn.Parameter]:
    """Return the parameters of some modules, on a device; a string is a regular expression for their full names.

    None means no modules: it is the value of ``ignored_modules`` that is not given.
    """
    import re

    if isinstance(modules, str):
        pattern = re.compile(modules)
        modules = [part for name, part in model.named_modules() if pattern.fullmatch(name)]
    found: set[nn.Parameter] = set()
    for part in modules or ():
        found.update(part.to(device).parameters())
    return found


def get_pretty_name(obj: Any) -> str:
    """Return the qualified name of a class or function, or of the class of an object."""
    named = obj if hasattr(obj, "__qualname__") or hasattr(obj, "__name__") else type(obj)
    return getattr(named, "__qualname__", None) or getattr(named, "__name__", None) or str(obj)


def model_has_dtensor(model: nn.Module) -> bool:
    """Return whether a parameter of a model is a DTensor."""
    from torch.distributed.tensor import DTensor

    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def get_model_tp_size(model: nn.Module) -> int | None:
    """Return the number of devices among which transformers has divided a model's layers; None if it has not."""
    own = getattr(model, "tp_size", None)
    if isinstance(own, int):
        return own
    found: Any = getattr(getattr(model, "config", None), "distributed_config", None)
    return found.get("tp_size") if isinstance(found, Mapping) else getattr(found, "tp_size", None)


def clean_state_dict_for_safetensors(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors as contiguous ones that share no memory; of the names of one tensor only the first is kept."""
    named = drop_tied_duplicates(state_dict)
    if removed := [name for name in state_dict if name not in named]:
        get_logger("accelerate.utils.other").warning(
            f"left out {removed}: a tensor of several names is stored once, under its first name; tie the weights "
            "after loading"
        )
    kept: dict[str, Any] = {}
    for name, value in named.items():
        others = [other for other in kept.values() if isinstance(other, Tensor)]
        kept[name] = copy_if_shared(value, others) if isinstance(value, Tensor) else value
    return kept


def load(f: str | os.PathLike[str], map_location: Any = None, **kwargs: Any) -> Any:
    """Read a file of torch.save, tensors and plain values only; raise MisuseError for ``weights_only=False``."""
    if kwargs.pop("weights_only", True) is False:
        raise MisuseError(
            "load() got weights_only=False, which would run code from the file: call torch.load for a file you trust"
        )
    return torch.load(f, map_location=map_location, weights_only=True, **kwargs)


def get_mixed_precision_context_manager(
    native_amp: bool = False, autocast_kwargs: Any = None
) -> AbstractContextManager[Any]:
    """Return the autocast context of the newest `Accelerator`'s precision; an empty one without it, or in float32."""
    from accel_nb.compat.states import AcceleratorState

    state = AcceleratorState() if native_amp and AcceleratorState._shared_state else None
    dtype = (
        None
        if state is None
        else {"bf16": torch.bfloat16, "fp16": torch.float16}.get(str(vars(state).get("mixed_precision")))
    )
    given = {} if autocast_kwargs is None else autocast_kwargs.to_kwargs()
    if state is None or dtype is None:
        return nullcontext()
    return torch.autocast(state.device.type, dtype=dtype, **given)


def get_grad_scaler(distributed_type: Any = None, **kwargs: Any) -> torch.amp.GradScaler:
    """Return torch's scaler of losses for this machine's device."""
    from accel_nb.runtime.devices.registry import default_type

    return torch.amp.GradScaler(default_type().name, **kwargs)


def get_fsdp2_grad_scaler(**kwargs: Any) -> torch.amp.GradScaler:
    """Return torch's scaler, which works on FSDP2's sharded gradients too."""
    return get_grad_scaler(None, **kwargs)
