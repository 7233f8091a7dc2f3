"""What torch's compilers to other formats see while a plain cell runs: torch's own functions, and plain models."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.jit import _builtins

from accel_nb.runtime.tensors.instance_patching import plain_class, plain_view


@contextmanager
def known_to_compiler(replaced: Iterable[tuple[Any, Any]]) -> Iterator[None]:
    """While the block runs, TorchScript compiles calls of replacements as calls of torch's own functions.

    It finds the operator of a function by the function's identity. ``replaced`` are pairs: torch's own, and the other.
    """
    table = _builtins._get_builtin_table()
    added = {id(function): table[id(plain)] for plain, function in replaced if id(plain) in table}
    table.update(added)
    try:
        yield
    finally:
        for key in added:
            table.pop(key, None)


def of_plain_model(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that is given the plain model, which shares its weights, in place of a prepared one."""

    @functools.wraps(plain)
    def compile_plainly(*args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], nn.Module) and plain_class(args[0]) is not type(args[0]):
            return plain(plain_view(args[0]), *args[1:], **kwargs)
        return plain(*args, **kwargs)

    return compile_plainly
