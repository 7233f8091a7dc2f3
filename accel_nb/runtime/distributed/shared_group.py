"""Use of the worker's default process group by code that was written for ``torchrun``.

Such code calls ``init_process_group`` at its start and ``destroy_process_group`` at its end. In a worker the default
group exists before the code runs and is needed afterwards: the first call uses the open group, the second restores its
timeout.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from accel_nb.errors import ConfigError

_ORIGINAL = "_accel_nb_original"


def original_function(name: str) -> Callable[..., Any]:
    """Return torch's function of this name, which `share_default_group` may have replaced."""
    function = getattr(c10d, name)
    return getattr(function, _ORIGINAL, function)


def share_default_group(timeout_s: float) -> None:
    """Replace both functions in this process; ``timeout_s`` is the timeout of its groups.

    A second call has no effect.
    """
    keep = functools.partial(_keep_default_group, timedelta(seconds=timeout_s))
    for name, make in (("init_process_group", _reuse_open_group), ("destroy_process_group", keep)):
        original = original_function(name)
        replacement = functools.wraps(original)(make(original))
        setattr(replacement, _ORIGINAL, original)
        for module in (c10d, dist):
            setattr(module, name, replacement)


def _reuse_open_group(init: Callable[..., Any]) -> Callable[..., Any]:
    def init_process_group(
        backend: str | None = None,
        init_method: str | None = None,
        timeout: timedelta | None = None,
        *args: Any,
        **more: Any,
    ) -> None:
        if not dist.is_initialized():
            init(backend, init_method, timeout, *args, **more)
            return
        requested = dict(zip(("world_size", "rank"), args, strict=False)) | more
        actual = {"world_size": dist.get_world_size(), "rank": dist.get_rank()}
        for name, value in actual.items():
            if requested.get(name, -1) not in (-1, value):
                raise ConfigError(
                    f"init_process_group({name}={requested[name]}): this worker's group has {name} {value}"
                )
        backend_name = dist.get_backend()
        if backend is not None and backend_name not in str(backend).lower():
            raise ConfigError(
                f"init_process_group({backend!r}): this worker's group is {backend_name}; pass that, or nothing"
            )
        if timeout is not None:
            c10d._set_pg_timeout(timeout)

    return init_process_group


def _keep_default_group(timeout: timedelta, destroy: Callable[..., Any]) -> Callable[..., Any]:
    def destroy_process_group(group: Any = None) -> None:
        if group is not None and group is not dist.group.WORLD:
            destroy(group)
        elif dist.is_initialized():
            c10d._set_pg_timeout(timeout)

    return destroy_process_group
