"""Type checks for objects of torch that do not import torch."""

from __future__ import annotations

import random
import sys
import types
from collections.abc import Mapping
from typing import Any


def is_module(value: Any) -> bool:
    """Return whether the value is a torch module."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def is_module_class(value: Any) -> bool:
    """Return whether the value is a class of torch modules."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, type) and issubclass(value, torch.nn.Module)


def is_data_parallel(value: Any) -> bool:
    """Return whether the value is a torch module that averages the gradients of the ranks of a group."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.parallel.DistributedDataParallel)


def is_tensor(value: Any) -> bool:
    """Return whether the value is a torch tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_device(value: Any) -> bool:
    """Return whether the value is one of torch's names of devices."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.device)


def is_sparse(tensor: Any) -> bool:
    """Return whether a tensor has a layout other than strides, and so no number of bytes."""
    return tensor.layout is not sys.modules["torch"].strided


def is_plain_array(value: Any) -> bool:
    """Return whether the value is an array of NumPy's own class, not of a subclass."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray


def is_array_scalar(value: Any) -> bool:
    """Return whether the value is a number of NumPy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.generic)


def is_frame(value: Any) -> bool:
    """Return whether the value is a table, a column or an index of pandas' own classes."""
    pandas: Any = sys.modules.get("pandas")
    return hasattr(pandas, "Index") and type(value) in (pandas.DataFrame, pandas.Series, pandas.Index)


def is_lazy(tensor: Any) -> bool:
    """Return whether a tensor is a parameter or buffer of a lazy layer that was not called yet."""
    return bool(sys.modules["torch"].nn.parameter.is_lazy(tensor))


def is_optimizer(value: Any) -> bool:
    """Return whether the value is a torch optimizer."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.optim.Optimizer)


def parameters_of(optimizer: Any) -> list[Any]:
    """Return the parameters of an optimizer's groups."""
    return [value for group in optimizer.param_groups for value in group["params"]]


def is_scheduler(value: Any) -> bool:
    """Return whether the value is a torch learning-rate scheduler."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.optim.lr_scheduler.LRScheduler)


def training_kinds() -> tuple[type, ...]:
    """Return the classes of modules, optimizers and schedulers, which are updated in place by their states."""
    torch = sys.modules.get("torch")
    return () if torch is None else (torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)


def is_training_object(value: Any) -> bool:
    """Return whether the value is a module, an optimizer or a scheduler."""
    return isinstance(value, training_kinds())


def attributes_of(value: Any) -> dict[str, Any] | None:
    """Return the attributes of an object, those in slots included; None if it can have none of its own."""
    try:
        own = vars(value)
    except Exception:  # the class has no attributes, and a ``__getattr__`` that may raise anything
        own = None
    slots = _slots(type(value))
    if not slots:
        return own
    return {name: slot.__get__(value) for name, slot in slots.items() if _is_set(slot, value)} | (own or {})


def set_attributes(value: Any, attributes: Mapping[str, Any], *, is_complete: bool = True) -> None:
    """Set attributes of an object, as `attributes_of` returns them; if they are complete, delete all others."""
    slots = _slots(type(value))
    for name, slot in slots.items():
        if name in attributes:
            slot.__set__(value, attributes[name])
        elif is_complete and _is_set(slot, value):
            slot.__delete__(value)
    rest = {name: item for name, item in attributes.items() if name not in slots}
    if is_complete and hasattr(value, "__dict__"):
        vars(value).clear()
    if rest:
        vars(value).update(rest)


def _slots(kind: type) -> dict[str, types.MemberDescriptorType]:
    """Return the slots that a class and its bases declare by ``__slots__``, by name."""
    return {
        name: item
        for base in kind.__mro__
        if "__slots__" in vars(base)
        for name, item in vars(base).items()
        if isinstance(item, types.MemberDescriptorType)
    }


def _is_set(slot: types.MemberDescriptorType, value: Any) -> bool:
    try:
        slot.__get__(value)
    except AttributeError:
        return False
    return True


def is_loader(value: Any) -> bool:
    """Return whether the value is a torch data loader."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.utils.data.DataLoader)


def is_generator(value: Any) -> bool:
    """Return whether the value is a random number generator of torch, NumPy or the standard library."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    return (
        type(value) is random.Random
        or (torch is not None and isinstance(value, torch.Generator))
        or (numpy is not None and isinstance(value, numpy.random.Generator | numpy.random.RandomState))
    )


def generator_state(generator: Any) -> Any:
    """Return a generator's state, for `set_generator_state`."""
    if type(generator) is random.Random:
        return generator.getstate()
    if hasattr(generator, "bit_generator"):
        return generator.bit_generator.state
    return generator.get_state()


def set_generator_state(generator: Any, state: Any) -> None:
    """Set a generator's state in place."""
    if type(generator) is random.Random:
        generator.setstate(state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)
