"""Operations on sharded tensors by code that was written for one device.

Outside of its forward pass a sharded model has a `DTensor` for each parameter and gradient. PyTorch's operations on
these equal those of one device only if they are elementwise on DTensors alone: PyTorch raises if plain tensors are
among the arguments, draws other random numbers, and some versions compute wrong means of uneven shards. Here all
operations have the results of one device: sharded tensors stay sharded where torch's own operation is right, and are
gathered where it is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from accel_nb.errors import MisuseError
from accel_nb.runtime.distributed import sharded
from accel_nb.runtime.distributed.communicator import Communicator
from accel_nb.runtime.distributed.gathered_copies import GatheredCopies
from accel_nb.runtime.tensors.nested import find_tensors, map_tensors
from accel_nb.runtime.tensors.versions import outside_inference_mode

_CORRECT_ON_DTENSOR = """
    __get__ __hash__ __len__ dim ndimension size numel nelement stride is_contiguous element_size data_ptr
    untyped_storage storage_offset is_floating_point is_complex is_shared has_names type is_same_size get_device
    _is_view register_hook register_post_accumulate_grad_hook requires_grad_ retain_grad backward detach detach_
    share_memory_ zeros_like ones_like empty_like full_like
"""
"""Functions that do not read the values of a tensor, or that PyTorch computes correctly on a `DTensor`."""

_RANDOM = """
    normal_ uniform_ bernoulli_ exponential_ random_ cauchy_ geometric_ log_normal_ randn_like rand_like randint_like
    bernoulli multinomial normal poisson dropout dropout_ alpha_dropout feature_dropout native_dropout rrelu
"""
_NEEDS_FULL_TENSOR = """
    __getitem__ select narrow split chunk unbind tensor_split diagonal view reshape flatten unflatten squeeze unsqueeze
    index_select new_zeros new_ones new_empty new_full new_tensor numpy __array__ __repr__ __reduce_ex__ equal allclose
    isclose
"""
"""Functions for which torch reads this rank's shard only, or has no sharding rule in some cases."""

_WRITING = """
    __set__ __setitem__ __iadd__ __isub__ __imul__ __itruediv__ __ifloordiv__ __imod__ __ipow__ __iand__ __ior__
"""


class ShardedArithmetic:
    """Computes operations on sharded tensors as on one device; every rank must make the same calls.

    With ``problem`` no tensor is gathered: `MisuseError` with this text is raised instead.

    Views of gathered tensors are kept equal to the sharded ones, see `GatheredCopies`: writes to them are copied into
    the shards before each operation on sharded tensors, each call of a module and each optimizer step.
    """

    def __init__(self, comm: Communicator, problem: str | None = None) -> None:
        self._comm = comm
        self._problem = problem
        self._correct_on_dtensor = frozenset(_CORRECT_ON_DTENSOR.split())
        self._random = frozenset(_RANDOM.split())
        self._needs_full_tensor = frozenset(_NEEDS_FULL_TENSOR.split()) | self._random
        self._writing = frozenset(_WRITING.split())
        self._copies = GatheredCopies(comm)

    @contextmanager
    def enabled(self, *, is_on_some_ranks: bool = False) -> Iterator[ShardedArithmetic]:
        """Compute all operations on sharded tensors by this object inside of the block.

        Every rank must enter it. With ``is_on_some_ranks`` only the ranks that run the cell enter it, and the gathered
        copies of earlier cells are not resumed.
        """
        owner: Any = DTensor
        original = owner.__torch_function__  # torch disables it

        def torch_function(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            # Inference mode forbids views of sharded tensors, and writes into copies are detected by versions.
            with torch._C.DisableTorchFunctionSubclass(), outside_inference_mode():
                return self._call(func, args, kwargs or {})

        owner.__torch_function__ = classmethod(torch_function)
        if not is_on_some_ranks:
            self._copies.resume(sharded.copies())
        sharded.record_copies(self._copies if self._problem is None else None)
        before = register_optimizer_step_pre_hook(lambda *_: self._before_step())
        after = register_optimizer_step_post_hook(lambda *_: self._after_step())
        try:
            yield self
            self._copies.refresh()
        finally:
            owner.__torch_function__ = original
            before.remove()
            after.remove()
            self._copies.close()

    def _before_step(self) -> None:
        self._copies.raise_if_parameters_share_memory()
        self._copies.write_back()

    def _after_step(self) -> None:
        self._copies.writes += 1
        self._copies.refresh()

    def _call(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__deepcopy__":
            is_parameter = isinstance(args[0], nn.Parameter) and self._problem is None
            return self._copy_parameter(*args) if is_parameter else _copy_deeply(func, args[0], args[1])
        if name == "detach" and isinstance(args[0], DTensor) and args[0].is_leaf:
            result = func(*args, **kwargs)
            self._copies.record_alias(result)
            return result
        if name in self._correct_on_dtensor or (name == "__set__" and _is_not_plain_tensor(args[1])):
            return func(*args, **kwargs)
        self._copies.write_back()
        if args and isinstance(args[0], list | tuple) and name.startswith("_"):  # of optimizers: `_foreach_mul_`
            result = self._call_lists(func, name, args, kwargs)
            self._copies.writes += 1
            self._copies.refresh()
            return result
        tensors = list(find_tensors([args, kwargs]))
        if tensors and (name in self._writing or (name.endswith("_") and not name.startswith("__"))):
            result = self._write(func, name, tensors, args, kwargs)
            self._copies.writes += 1
            self._copies.refresh()
            return result
        is_plain = any(not isinstance(tensor, DTensor) and tensor.dim() for tensor in tensors)
        has_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        if not (is_plain or has_gradient or name in self._needs_full_tensor):
            try:
                result = func(*args, **kwargs)
            except Exception:  # torch has no sharding rule: the full tensors give the result, or the same error
                return self._call_on_full_tensors(func, args, kwargs)
            if all(_is_elementwise(found, tensors[0]) for found in find_tensors(result)):
                return result
        return self._call_on_full_tensors(func, args, kwargs)

    def _copy_parameter(self, parameter: Any, memo: dict[int, Any]) -> Any:
        """Copy a parameter as an unsharded one, like the parameters of a copied model."""
        if id(parameter) not in memo:
            copied = nn.Parameter(sharded.gather_full(parameter, self._comm), parameter.requires_grad)
            if parameter.grad is not None:
                copied.grad = memo[id(parameter.grad)] = self._gather(parameter.grad.detach())
            memo[id(parameter)] = copied
        return memo[id(parameter)]

    def _call_lists(self, func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call a foreach function, such as ``_foreach_add``, for the tensors at each index of the lists.

        Torch has sharding rules for some of these functions only, and for none if a list has plain tensors.
        """
        targets, tensors = args[0], list(find_tensors(args))
        is_elementwise = name.endswith("_") or hasattr(torch, f"{name}_")  # norms and the like are not done in place
        if not is_elementwise and len({isinstance(tensor, DTensor) for tensor in targets}) > 1:
            return [func([target], *args[1:], **kwargs)[0] for target in targets]
        has_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        if not is_elementwise or has_gradient or any(map(_is_partial, tensors)) or not name.startswith("_foreach_"):
            return func(*args, **kwargs)

        def select(items: Sequence[Any]) -> list[Any]:
            pairs = zip(targets, items, strict=True)
            return [self._local_part_like(target, item) if isinstance(item, Tensor) else item for target, item in pairs]

        own = [select(arg) if isinstance(arg, list | tuple) else map_tensors(self._gather, arg) for arg in args]
        results = func(*own, **kwargs)
        if results is None:
            return None
        pairs = zip(targets, results, strict=True)
        return [sharded.shard_like(target, shard) if isinstance(target, DTensor) else shard for target, shard in pairs]

    def _local_part_like(self, target: Tensor, tensor: Tensor) -> Tensor:
        """Return the part of ``tensor`` that corresponds to this rank's shard of ``target``.

        All of it if that is unsharded.
        """
        if not isinstance(target, DTensor):
            return self._gather(tensor)
        return sharded.local_shard(_shard_like(target)(tensor))

    def _write(
        self, func: Callable[..., Any], name: str, tensors: Sequence[Tensor], args: Sequence[Any], kwargs: Any
    ) -> Any:
        """Call a function that writes into its first tensor."""
        target, others = tensors[0], tensors[1:]
        if not isinstance(target, DTensor):
            return self._call_on_full_tensors(func, args, kwargs)
        is_elementwise = name not in self._random and not _is_initializer(func) and name != "__setitem__"
        if is_elementwise and all(tensor.shape == target.shape for tensor in others if tensor.dim()):
            values = map_tensors(_shard_like(target), [list(args), kwargs])
            try:
                return func(*values[0], **values[1])
            except Exception:  # torch has no sharding rule, or raises for plain tensors too
                if target.requires_grad and torch.is_grad_enabled():
                    raise
        whole = self._gather(target.detach())
        values = map_tensors(lambda tensor: whole if tensor is target else self._gather(tensor), [list(args), kwargs])
        func(*values[0], **values[1])
        with torch.no_grad():
            sharded.copy_into(target, whole)
        return target

    def _call_on_full_tensors(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        gathered: list[tuple[Any, Tensor]] = []

        def gather(tensor: Tensor) -> Tensor:
            whole = self._gather(tensor)
            if whole is not tensor and not whole.requires_grad and not _is_partial(tensor):
                gathered.append((tensor, whole))
            return whole

        values = map_tensors(gather, [list(args), kwargs])
        result = func(*values[0], **values[1])
        for target, whole in gathered:
            if isinstance(result, numpy.ndarray) or any(_is_view(found, whole) for found in find_tensors(result)):
                self._copies.add(target, whole, by_value=isinstance(result, numpy.ndarray))
        return result

    def _gather(self, tensor: Tensor) -> Tensor:
        """Return the full tensor, with a gradient."""
        if not isinstance(tensor, DTensor):
            return tensor
        if self._problem is not None:
            raise MisuseError(self._problem)
        if _is_partial(tensor):
            return sharded.add_up_shards(tensor)
        if torch.is_grad_enabled() and tensor.requires_grad:
            return _Gather.apply(tensor, self._comm)  # pyright: ignore[reportReturnType]
        return sharded.gather_full(tensor, self._comm)


def _copy_deeply(func: Callable[..., Any], tensor: Any, memo: dict[int, Any]) -> Any:
    """Copy a sharded tensor and its gradient, which torch's function cannot copy."""
    if id(tensor) in memo or not tensor.is_leaf or tensor.grad is None:
        return func(tensor, memo)
    gradient, tensor.grad = tensor.grad, None
    try:
        copied = func(tensor, memo)
    finally:
        tensor.grad = gradient
    copied.grad = memo[id(gradient)] = gradient.detach().clone()
    return copied


def _shard_like(target: DTensor) -> Callable[[Tensor], Tensor]:
    """Return a function that shards full tensors as ``target`` is, and returns sharded ones and numbers unchanged."""

    def shard(tensor: Tensor) -> Tensor:
        if isinstance(tensor, DTensor) or not tensor.dim():
            return tensor
        return sharded.shard_like(target, sharded.own_shard(target, tensor).to(target.device))

    return shard


def _is_elementwise(result: Any, tensor: Tensor) -> bool:
    """Return whether a result has the shape of a tensor, so that no uneven shards were averaged or summed."""
    return not isinstance(result, DTensor) or (
        result.dim() > 0 and result.shape == tensor.shape and not _is_partial(result)
    )


def _is_partial(tensor: Tensor) -> bool:
    """Return whether a `DTensor` has partial placements, whose values are not summed over ranks yet."""
    return isinstance(tensor, DTensor) and any(place.is_partial() for place in tensor.placements)


def _is_view(result: Tensor, whole: Tensor) -> bool:
    """Return whether a result shares memory with a full tensor."""
    return result is whole or result._base is whole


def _is_not_plain_tensor(value: Any) -> bool:
    return not isinstance(value, Tensor) or isinstance(value, DTensor)


def _is_initializer(func: Callable[..., Any]) -> bool:
    return getattr(func, "__module__", None) == "torch.nn.init"


class _Gather(Function):
    """Gathers a sharded tensor. The gradient of the full tensor is averaged over ranks, like a model's gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, comm: Communicator) -> Tensor:
        ctx.arguments = tensor.detach(), comm
        return sharded.gather_full(tensor, comm)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        like, comm = ctx.arguments
        return _AverageAndShard.apply(gradients[0], like, comm), None


class _AverageAndShard(Function):
    """Averages a full tensor over ranks, and shards it like a sharded one."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, like: Any, comm: Communicator) -> Any:
        ctx.comm = comm
        mean = comm.all_reduce(whole.detach().clone(memory_format=torch.contiguous_format), "mean")
        return sharded.shard_like(like, sharded.own_shard(like, mean).clone())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _Gather.apply(gradients[0], ctx.comm), None, None
