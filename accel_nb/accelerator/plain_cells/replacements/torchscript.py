"""TorchScript, export and torch.fx while a plain cell runs: they receive the original functions and plain models."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.fx
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
    added = {id(function): table[id(original)] for original, function in replaced if id(original) in table}
    table.update(added)
    try:
        yield
    finally:
        for key in added:
            table.pop(key, None)


def replacements() -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """Yield the functions to patch: their owner, their name, and a function that returns the replacement."""
    for owner, name, position in (
        (torch.jit, "trace", 0),
        (torch.export, "export", 0),
        (torch.onnx, "export", 0),
        (torch.fx.Tracer, "trace", 1),
    ):
        yield owner, name, functools.partial(_compile_plain_model, position=position)
    yield torch.jit, "script", _refuse_sharded


def _compile_plain_model(original: Callable[..., Any], position: int) -> Callable[..., Any]:
    """Return ``original``, changed to replace a prepared model, its argument at ``position``, by a plain view of it.

    It raises `MisuseError` for a sharded model, whose parameters are whole in the notebook only.
    """

    @functools.wraps(original)
    def compile_plainly(*args: Any, **kwargs: Any) -> Any:
        model = args[position] if len(args) > position else None
        if not isinstance(model, nn.Module):
            return original(*args, **kwargs)
        _require_whole(original, model)
        is_prepared = plain_class(model) is not type(model)
        return original(*args[:position], plain_view(model) if is_prepared else model, *args[position + 1 :], **kwargs)

    return compile_plainly


def _refuse_sharded(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def script(obj: Any, *args: Any, _frames_up: int = 0, **kwargs: Any) -> Any:
        if isinstance(obj, nn.Module):
            _require_whole(original, obj)
        # TorchScript looks up the names that a class uses in the frame of the caller, which this frame is below.
        return original(obj, *args, _frames_up=_frames_up + 1, **kwargs)

    return script


def _require_whole(compile_model: Callable[..., Any], model: nn.Module) -> None:
    """Raise `MisuseError` if a model that is to be compiled is sharded."""
    if any(map(sharded.is_sharded, model.parameters())):
        raise MisuseError(
            f"{compile_model.__module__}.{compile_model.__name__} of a {type(model).__name__} needs whole parameters, "
            "of which each worker holds a shard: call it in a cell without workers, after this one"
        )
