"""Tensors and random generators in a pickle stream; their data is in memory blocks beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accel_nb.pool.sync.objects.shared_memory import SharedBlock
from accel_nb.pool.sync.objects.user_attributes import tensor_attributes
from accel_nb.pool.sync.objects.user_hooks import gradient_hooks, reserve_numbers
from accel_nb.pool.sync.reductions.memory_blocks import MemoryBlock, MemoryBlocks
from accel_nb.runtime.devices.registry import default_type
from accel_nb.runtime.leaf_tensors import is_leaf


def reduce_tensor(tensor: Any, blocks: MemoryBlocks, gradient: Any) -> Any:
    """Reduce a tensor whose data is placed in ``blocks``, with the gradient to send with it, or None."""
    import torch

    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
        return reduce_other_leaf(tensor) or tensor.__reduce_ex__(5)
    data, is_conjugate = _in_memory(tensor)
    device = "cpu"
    if (shared := blocks.share_tensor(data)) is not None:
        block, layout = shared
    else:
        device, block, layout = _place(data, blocks)
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    name = str(data.dtype).removeprefix("torch.")
    if not is_leaf(tensor):
        rebuilt = _rebuild_inner_tensor, (block, name, layout, device, is_conjugate, gradient)
        own = tensor_attributes(tensor)
        return (*rebuilt, ({}, gradient, own), None, None, _set_tensor_state) if own else rebuilt
    arguments = block, name, layout, tensor.requires_grad, is_parameter, device, is_conjugate
    hooks = gradient_hooks(tensor)
    if gradient is not None and type(gradient) is not torch.Tensor:
        gradient = None
    own = tensor_attributes(tensor)
    if not hooks and gradient is None and not own:
        return _rebuild_tensor, arguments
    return _rebuild_tensor, arguments, (hooks, gradient, own), None, None, _set_tensor_state


def reduce_other_leaf(tensor: Any) -> Any:
    """Reduce a leaf that requires gradients, of a user's own tensor class or sparse; return None for other tensors.

    torch rebuilds these as the result of an operation on the leaf, so a backward pass would leave them without a
    gradient, or without ``requires_grad``.
    """
    import torch

    if not (is_leaf(tensor) and tensor.requires_grad) or isinstance(tensor, torch.nn.Parameter):
        return None
    is_sparse = tensor.layout is not torch.strided
    reduced = (tensor.detach() if is_sparse else tensor).__reduce_ex__(5)
    if len(reduced) > 2:
        return None
    gradient = tensor.grad
    if gradient is not None and type(gradient) is not torch.Tensor:
        gradient = gradient.as_subclass(torch.Tensor)
    state = gradient_hooks(tensor), gradient, tensor_attributes(tensor) if is_sparse else {}
    return _rebuild_leaf, reduced, state, None, None, _set_tensor_state


def reduce_data(tensor: Any, blocks: MemoryBlocks) -> Any:
    """Reduce a tensor without gradients to its data, even if the receiver holds an object with the same memory."""
    import torch

    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
        return tensor.detach().__reduce_ex__(5)
    data, is_conjugate = _in_memory(tensor)
    device, block, layout = _place(data, blocks)
    return _rebuild_tensor, (block, str(data.dtype).removeprefix("torch."), layout, False, False, device, is_conjugate)


def reduce_sharded_view(tensor: Any, blocks: MemoryBlocks) -> Any:
    """Reduce a sharded tensor whose memory is that of a tensor that the receiver holds; return None for others."""
    found = blocks.share_tensor(tensor)
    if found is None or found[1][0] or not found[0].is_like(tensor):
        return None
    import torch

    (block, layout), name = found, str(tensor.dtype).removeprefix("torch.")
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    return _rebuild_tensor, (block, name, layout, tensor.requires_grad and is_leaf(tensor), is_parameter, "cpu")


def _in_memory(tensor: Any) -> tuple[Any, bool]:
    """Return the data of a tensor as it is in memory, and whether the tensor is the conjugate of that.

    torch marks the result of ``conj()`` as such. The imaginary part of one is marked as negative: it is copied.
    """
    data = tensor.detach().resolve_neg()
    return (data.conj(), True) if data.is_conj() else (data, False)


def _place(data: Any, blocks: MemoryBlocks) -> tuple[str, MemoryBlock, tuple[int, tuple[int, ...], tuple[int, ...]]]:
    block, layout = blocks.place_tensor(data if data.is_cpu else data.cpu())
    return "cpu" if data.is_cpu else "worker", block, layout


def _set_tensor_state(tensor: Any, state: tuple[dict[str, dict[int, Any]], Any, dict[str, Any]]) -> None:
    hooks, tensor.grad, own = state
    vars(tensor).update(own)
    for name, hook_dict in hooks.items():
        setattr(tensor, name, hook_dict)
        reserve_numbers(hook_dict)


def _rebuild_tensor(
    block: MemoryBlock | SharedBlock,
    dtype: str,
    layout: tuple[Any, Any, Any],
    requires_grad: bool,
    is_parameter: bool,
    device: str,
    is_conjugate: bool = False,
) -> Any:
    import torch

    tensor = block.tensor(dtype, layout)
    tensor = tensor.conj() if is_conjugate else tensor
    if device == "worker":
        tensor = tensor.to(default_type().name)
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_(requires_grad)


def _rebuild_leaf(rebuild: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    tensor = rebuild(*arguments)
    if tensor.is_leaf:
        return tensor.requires_grad_()
    leaf = tensor.detach().as_subclass(type(tensor)).requires_grad_()
    vars(leaf).update(vars(tensor))
    return leaf


def _rebuild_inner_tensor(
    block: MemoryBlock | SharedBlock,
    dtype: str,
    layout: tuple[Any, Any, Any],
    device: str,
    is_conjugate: bool,
    gradient: Any,
) -> Any:
    """Return a tensor that was computed with gradients in another process; a backward pass to it is refused."""
    from accel_nb.pool.sync.reductions.foreign_graphs import as_computed_elsewhere

    tensor = as_computed_elsewhere(lambda: _rebuild_tensor(block, dtype, layout, False, False, device, is_conjugate))
    if gradient is not None:
        tensor.retain_grad()
        tensor.grad = gradient
    return tensor


def reduce_generator(generator: Any) -> Any:
    """Reduce a random number generator of torch, which pickle cannot copy."""
    return _rebuild_generator, (str(generator.device), generator.get_state())


def _rebuild_generator(device: str, state: Any) -> Any:
    import torch

    generator = torch.Generator(device)
    generator.set_state(state)
    return generator
