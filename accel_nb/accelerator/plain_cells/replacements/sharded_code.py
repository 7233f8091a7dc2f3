"""Replacements of torch's functions while a plain cell, written for one device, trains sharded models."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from accel_nb.accelerator.plain_cells.replacements.late_imports import observed_imports
from accel_nb.errors import MisuseError
from accel_nb.runtime.distributed import sharded
from accel_nb.runtime.distributed.communicator import Communicator
from accel_nb.runtime.mesh import Mesh
from accel_nb.runtime.process.user_code import is_user_module

Replace = Callable[[tuple[Any, ...], str, Callable[[Any], Any]], object]
"""Replaces a function of several owners, by name, until the cell ends; the last argument is the factory."""


def adapt_to_sharding(
    stack: ExitStack,
    replace: Replace,
    comm: Communicator,
    mesh: Mesh,
    check_graph_can_be_kept: Callable[[], object],
    *,
    is_on_some_ranks: bool,
) -> None:
    """Replace functions, so that operations on sharded tensors have the results of one device, or are refused.

    ``check_graph_can_be_kept`` is called before gradients are computed that are differentiated again. Every
    rank must call, unless the cell ``is_on_some_ranks``.
    """
    problem = _STAGES_REFUSED if mesh.pp > 1 else None
    for owner, name, make in sharded.whole_number_methods(problem):
        replace((owner,), name, make)
    replace((nn.utils.stateless,), "_functional_call", _refuse_functional_call)
    for name in ("register_hook", "register_post_accumulate_grad_hook"):
        replace((Tensor,), name, _refuse_hooks)
    replace((torch.autograd,), "grad", functools.partial(_check_gradients, check_graph_can_be_kept))
    replace((torch.utils,), "swap_tensors", _skip_equal_swaps)
    if sharded.has_distributed_tensors():
        from accel_nb.runtime.distributed.sharded_arithmetic import ShardedArithmetic

        stack.enter_context(ShardedArithmetic(comm, problem).enabled(is_on_some_ranks=is_on_some_ranks))
    replace_safetensors = functools.partial(_replace_safetensors, replace)
    stack.enter_context(observed_imports({_SAFETENSORS}, replace_safetensors))
    replace_safetensors()


def _replace_safetensors(replace: Replace) -> None:
    """Replace the functions of safetensors that read tensors by their memory."""
    module = sys.modules.get(_SAFETENSORS)
    for name in ("save", "save_file"):
        if module is not None and hasattr(module, name):
            replace((module,), name, _save_full_tensors)


def _save_full_tensors(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def save(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(tensors, dict):
            tensors = {name: sharded.full_tensor(value) for name, value in tensors.items()}
        return original(tensors, *args, **kwargs)

    return save


def _skip_equal_swaps(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``swap_tensors`` that does nothing for sharded tensors in the same memory.

    `Module.to` exchanges them also where it converts nothing, and PyTorch raises an error if anything refers to one.
    """

    @functools.wraps(original)
    def swap_tensors(t1: Tensor, t2: Tensor) -> None:
        if not (sharded.is_sharded(t1) and _memory_of_shard(t1) == _memory_of_shard(t2)):
            original(t1, t2)

    return swap_tensors


def _memory_of_shard(tensor: Tensor) -> tuple[Any, ...]:
    shard = sharded.local_shard(tensor)
    return shard.data_ptr(), shard.device, shard.dtype, shard.shape, shard.stride()


def _refuse_functional_call(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def functional_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if any(sharded.is_sharded(value) for part in module.modules() for value in part._parameters.values()):
            raise MisuseError(
                _REFUSED.format(what=f"functional_call of a {type(module).__name__}", why=_GATHERS_WHEN_CALLED)
            )
        return original(module, *args, **kwargs)

    return functional_call


def _refuse_hooks(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def register(tensor: Tensor, hook: Callable[..., Any]) -> Any:
        if tensor.is_leaf and sharded.is_sharded(tensor) and is_user_module(sys._getframe(1).f_globals.get("__name__")):
            raise MisuseError(_REFUSED.format(what="a hook on a parameter", why=_SHARDED_GRADIENTS))
        return original(tensor, hook)

    return register


def _check_gradients(check_graph_can_be_kept: Callable[[], object], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        names = dict(zip(("grad_outputs", "retain_graph", "create_graph"), args, strict=False)) | kwargs
        if names.get("create_graph"):
            check_graph_can_be_kept()
        listed = [inputs] if isinstance(inputs, Tensor) else list(inputs)  # an iterator is read once
        parts = [number for number, value in enumerate(listed) if sharded.is_sharded(value)]
        if not parts:
            return original(outputs, listed, *args, **kwargs)
        fills = kwargs.pop("materialize_grads", False)
        if fills:
            kwargs["allow_unused"] = True
        try:
            gradients = original(outputs, listed, *args, **kwargs)
        except RuntimeError as error:
            raise _gradients_refusal() from error
        if all(gradients[number] is None for number in parts):  # with allow_unused
            raise _gradients_refusal()
        if fills:
            pairs = zip(listed, gradients, strict=True)
            return tuple(torch.zeros_like(value) if gradient is None else gradient for value, gradient in pairs)
        return gradients

    return grad


def _gradients_refusal() -> MisuseError:
    # The graph references the gathered parameters, and not the parts.
    return MisuseError(_REFUSED.format(what="torch.autograd.grad with respect to parameters", why=_SHARDED_GRADIENTS))


_SAFETENSORS = "safetensors.torch"
_STAGES_REFUSED = (
    "the code computes with parameters or gradients of a model in stages, of which each worker holds some: do it after "
    "the cell, use clip_grad_norm_ for the norm of gradients, or train with --pp 1"
)
_GATHERS_WHEN_CALLED = "which gathers its own parameters when it is called"
_SHARDED_GRADIENTS = "whose gradients arise in the backward pass, as parts"
_REFUSED = "{what} is not possible for a sharded model, {why}: train with --strategy ddp, which holds copies"
