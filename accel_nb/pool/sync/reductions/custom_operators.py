"""Operators of ``torch.library.custom_op`` in a pickle stream: each process defines them for itself.

One of an imported module is looked up there. One of the notebook is defined again with the functions that were
registered for it; defining an operator again replaces it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any


def is_custom_operator(value: Any) -> bool:
    """Return whether a value is what ``torch.library.custom_op`` returns."""
    return type(value).__name__ == "CustomOpDef" and type(value).__module__.startswith("torch.")


def called_operators(namespace: Mapping[str, Any], mentioned: Collection[str]) -> list[str]:
    """Return the names of operators that code may call as ``torch.ops.package.name``, by all words in the code."""
    if "ops" not in mentioned:
        return []
    operators = [(name, value) for name, value in namespace.items() if is_custom_operator(value)]
    return [name for name, operator in operators if all(part in mentioned for part in operator._qualname.split("::"))]


def reduce_custom_operator(operator: Any) -> Any:
    """Reduce an operator to its place in a module, or to its functions.

    Raise TypeError if it has functions of its own for devices, subclasses of tensors or autocast.
    """
    function = operator._init_fn
    module = sys.modules.get(function.__module__)
    if function.__module__ != "__main__" and getattr(module, function.__name__, None) is operator:
        return getattr, (module, function.__name__)
    if set(operator._backend_fns) != {None} or operator._torch_dispatch_fns or operator._autocast_dtype:
        raise TypeError("it has functions of its own for devices; define it in a module, and import it")
    registered = (operator._abstract_fn, operator._backward_fn, operator._setup_context_fn, operator._vmap_fn)
    return _define, (operator._qualname, function, operator._schema, registered)


def _define(name: str, function: Callable[..., Any], schema: str, registered: tuple[Any, Any, Any, Any]) -> Any:
    import torch

    mutated = tuple(re.findall(r"\(\w+!\)\S* (\w+)", schema))
    operator: Any = torch.library.custom_op(name, function, mutates_args=mutated, schema=schema)
    fake, backward, setup_context, vmap = registered
    if fake is not None:
        operator.register_fake(fake)
    if backward is not None:
        operator.register_autograd(backward, setup_context=setup_context)
    if vmap is not None:
        operator.register_vmap(vmap)
    return operator
