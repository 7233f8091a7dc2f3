"""Functions for single tensors of modules, with accelerate's names: listing, moving, tying and loading."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from accel_nb.bigmodel.meta import clone_parameter_onto
from accel_nb.errors import MisuseError

_BITS = 8


def dtype_byte_size(dtype: torch.dtype) -> float:
    """Return the bytes of one element; an eighth for bool, which accelerate counts as one bit."""
    return 1 / _BITS if dtype is torch.bool else dtype.itemsize


def id_tensor_storage(tensor: Tensor) -> tuple[torch.device, int, int]:
    """Return device, address and size of a tensor's storage: equal for tensors that share their memory."""
    storage = tensor.untyped_storage()
    return tensor.device, storage.data_ptr(), storage.nbytes()


def check_device_same(first_device: torch.device | str | int, second_device: torch.device | str | int) -> bool:
    """Return whether two devices are the same; one without an index is that type's current device."""
    return _numbered(torch.device(first_device)) == _numbered(torch.device(second_device))


def _numbered(device: torch.device) -> tuple[str, int]:
    if device.index is not None or device.type in ("cpu", "meta"):
        return device.type, device.index or 0
    module = torch.get_device_module(device)
    return device.type, module.current_device() if module.is_available() else 0


def get_non_persistent_buffers(module: nn.Module, recurse: bool = False, fqns: bool = False) -> set[str]:
    """Return the names of the buffers that are not in the state dict, optionally with the names of their modules."""
    found: set[str] = set()
    for prefix, part in module.named_modules() if recurse else [("", module)]:
        joined = f"{prefix}." if prefix and fqns else ""
        found.update(joined + name for name in part._non_persistent_buffers_set)
    return found


def named_module_tensors(
    module: nn.Module, include_buffers: bool = True, recurse: bool = False, remove_non_persistent: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters, then buffers, with their names."""
    yield from module.named_parameters(recurse=recurse)
    if include_buffers:
        without = get_non_persistent_buffers(module, recurse, True) if remove_non_persistent else set[str]()
        yield from ((name, value) for name, value in module.named_buffers(recurse=recurse) if name not in without)


def set_module_tensor_to_device(
    module: nn.Module,
    tensor_name: str,
    device: int | str | torch.device,
    value: Tensor | None = None,
    dtype: str | torch.dtype | None = None,
    fp16_statistics: Tensor | None = None,
    tied_params_map: MutableMapping[int, MutableMapping[Any, Tensor]] | None = None,
    non_blocking: bool = False,
    clear_cache: bool = True,
) -> None:
    """Move a parameter or buffer, by its dotted name, to a device, with its own values or with ``value``.

    A tensor that is there already stays the same object, so that ties and optimizers keep it. Values get ``dtype`` if
    they are floating-point numbers; without it those of ``value`` get the dtype of the tensor that they replace.
    ``tied_params_map`` has for the address of a shared tensor its copy on each device, which is used again.
    ``clear_cache`` is accepted: memory is freed by PyTorch when it is needed.

    Raises ValueError for a value of another shape, and for a meta tensor if no value is given.
    """
    if fp16_statistics is not None:
        raise MisuseError(
            "fp16_statistics are of bitsandbytes' 8-bit weights, which their layers load themselves: give the model to "
            "load_and_quantize_model"
        )
    path, _, name = tensor_name.rpartition(".")
    module = module.get_submodule(path)
    tensors = module._parameters if name in module._parameters else module._buffers
    if name not in tensors:
        raise ValueError(f"{type(module).__name__} has no parameter and no buffer {name!r}")
    old = tensors[name]
    source = old if value is None else value
    if source is None or (old is None and value is None):
        return
    target = _as_device(device)
    if value is None and source.is_meta and target.type != "meta":
        raise ValueError(f"{tensor_name} is a meta tensor, which has no values: moving it to {device} needs value=...")
    if value is not None and old is not None and old.shape != value.shape and not hasattr(old, "quant_state"):
        raise ValueError(
            f"value has shape {tuple(value.shape)}, and {tensor_name} of {type(module).__name__} has "
            f"{tuple(old.shape)}: is the checkpoint that of another model?"
        )
    shared = None if tied_params_map is None else tied_params_map.get(source.data_ptr())
    if shared is not None and target in shared:
        tensors[name] = _like(old, shared[target])
        return
    kind = _target_dtype(source, dtype, old)
    if value is None and check_device_same(source.device, target) and kind in (None, source.dtype):
        return
    moved = source.detach().to(target, kind, non_blocking=non_blocking)
    tensors[name] = placed = _like(old, moved)
    if shared is not None and placed is not None:
        shared[target] = placed


def _target_dtype(source: Tensor, dtype: str | torch.dtype | None, old: Tensor | None) -> torch.dtype | None:
    """Return the dtype to which values that replace ``old`` are converted; None if they keep theirs."""
    if dtype is not None:
        wanted = getattr(torch, dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
        return wanted if source.is_floating_point() else None
    # Parameters of other classes may hold packed numbers.
    is_plain = type(old) in (nn.Parameter, Tensor)
    if old is not None and (is_plain or (source.is_floating_point() and old.is_floating_point())):
        return old.dtype
    return None


def _as_device(device: int | str | torch.device) -> torch.device:
    if isinstance(device, int):
        current = torch.accelerator.current_accelerator()
        return torch.device("cuda" if current is None else current.type, device)
    return torch.device(device)


def _like(old: Tensor | None, moved: Tensor) -> Any:
    """Return ``moved`` as a parameter of the class of ``old``, or as a plain tensor for a buffer."""
    return clone_parameter_onto(old, moved) if isinstance(old, nn.Parameter) and old is not moved else moved


def retie_parameters(model: nn.Module, tied_params: Sequence[Sequence[str]]) -> None:
    """Make each group of names one tensor again: the first that has values, else the first."""
    for names in tied_params:
        places = [(model.get_submodule(path), name) for path, _, name in (full.rpartition(".") for full in names)]
        values = [getattr(module, name) for module, name in places if getattr(module, name, None) is not None]
        if not values:
            continue
        kept = next((value for value in values if not value.is_meta), values[0])
        for module, name in places:
            setattr(module, name, kept)


def is_peft_model(model: nn.Module) -> bool:
    """Return whether a model, which may be compiled, is PEFT's."""
    from accel_nb.compat.names.availability import _is_available

    if not _is_available("peft"):
        return False
    from peft import PeftModel  # pyright: ignore[reportMissingImports]

    return isinstance(getattr(model, "_orig_mod", model), PeftModel)


def check_tied_parameters_in_config(model: nn.Module) -> bool:
    """Return whether the configuration of a model of transformers ties weights."""
    config = getattr(model, "config", None)
    flags = ("tie_word_embeddings", "tie_encoder_decoder")
    return any(getattr(config, flag, False) for flag in flags) and hasattr(model, "get_output_embeddings")


def check_tied_parameters_on_same_device(
    tied_params: Sequence[Sequence[str]], device_map: Mapping[str, int | str | torch.device]
) -> None:
    """Warn about groups of tied tensors that a device map places on several devices."""
    from accel_nb.accelerator.process.logging import get_logger
    from accel_nb.bigmodel.planning.placement import find_place

    for names in tied_params:
        places = {name: find_place(name, device_map) for name in names}
        if len({str(place) for place in places.values()}) > 1:
            get_logger("accelerate.utils.modeling").warning(
                "tied tensors are on several devices, so training and outputs would be wrong; give them one: %s", places
            )


def has_offloaded_params(module: nn.Module) -> bool:
    """Return whether an `AlignDevicesHook` loads the module's weights to its device for each forward pass."""
    return _offloading_hook(module) is not None


def _offloading_hook(module: nn.Module) -> Any:
    """Return the hook that loads the module's weights for each forward pass, alone or in a sequence, or None."""
    from accel_nb.compat.models.align_hooks import AlignDevicesHook
    from accel_nb.compat.models.model_hooks import SequentialHook

    hook = getattr(module, "_hf_hook", None)
    hooks = hook.hooks if isinstance(hook, SequentialHook) else [hook]
    return next((each for each in hooks if isinstance(each, AlignDevicesHook) and each.offload), None)


@contextmanager
def align_module_device(
    module: nn.Module, execution_device: torch.device | str | int | None = None
) -> Generator[None, None, None]:
    """Place the weights of the module itself, not of its submodules, on a device inside of the context."""
    hook = _offloading_hook(module)
    if hook is not None:
        wanted = hook.execution_device
        hook.execution_device = execution_device if execution_device is not None else wanted
        try:
            hook.pre_forward(module)
            try:
                yield
            finally:
                hook.post_forward(module, None)
        finally:
            hook.execution_device = wanted
        return
    if execution_device is None:
        yield
        return
    before = {name: value.device for name, value in module.named_parameters(recurse=False)}
    try:
        for name in before:
            set_module_tensor_to_device(module, name, execution_device)
        yield
    finally:
        for name, device in before.items():
            set_module_tensor_to_device(module, name, device)
