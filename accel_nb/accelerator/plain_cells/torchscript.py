"""Support for TorchScript and export while a plain cell runs: they receive the original functions and plain models."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.jit import _builtins

from accel_nb.errors import MisuseError
from accel_nb.runtime.distributed import sharded
from accel_nb.runtime.tensors.instance_patching import plain_class, plain_view


@contextmanager
def compile_replacements_as_torch(replaced: Iterable[tuple[Any, Any]]) -> Iterator[None]:
    """Make TorchScript compile calls of replaced functions as calls of the originals, inside of the block.

    TorchScript maps functions to operators by identity. ``replaced`` are pairs of a function of torch and its
    replacement.
    """
    table = _builtins._get_builtin_table()
    added = {id(function): table[id(plain)] for plain, function in replaced if id(plain) in table}
    table.update(added)
    try:
        yield
    finally:
        for key in added:
            table.pop(key, None)


def compile_plain_model(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``plain`` that replaces a prepared model in its first argument by a plain view of the model.

    It raises `MisuseError` for a sharded model, whose parameters are whole in the notebook only.
    """

    @functools.wraps(plain)
    def compile_plainly(*args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], nn.Module) and any(map(sharded.is_sharded, args[0].parameters())):
            raise MisuseError(
                f"{plain.__module__}.{plain.__name__} of a {type(args[0]).__name__} needs whole parameters, of which "
                "each worker holds a part: call it in a cell without workers, after this one"
            )
        if args and isinstance(args[0], nn.Module) and plain_class(args[0]) is not type(args[0]):
            return plain(plain_view(args[0]), *args[1:], **kwargs)
        return plain(*args, **kwargs)

    return compile_plainly
