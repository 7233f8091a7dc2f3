"""The actor that hosts a node's workers in a Ray cluster; imported on the nodes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from accel_nb.pool.nodes.frames import HEARTBEAT_S
from accel_nb.pool.nodes.host import NodeHost, own_versions, read_settings
from accel_nb.pool.nodes.ray_frames import pack, unpack

TAKE_S = 1.0

ray: Any = import_module("ray")


class RayHost:
    """A `NodeHost` behind actor calls, whose arguments and results are bytes or JSON."""

    def __init__(self) -> None:
        self._host: NodeHost | None = None

    def versions(self) -> str:
        """Return the versions of this node's packages."""
        return json.dumps(own_versions())

    def start(self, settings: str) -> None:
        """Start the host; its zygote imports in the background."""
        self._host = NodeHost(read_settings(json.loads(settings)))

    @ray.method(concurrency_group="send")
    def receive(self, frames: Any, stored: Sequence[Any] = ()) -> None:
        """Accept frames from the kernel, or a reference to them, in the order of the calls."""
        assert self._host is not None
        self._host.receive(unpack(ray.get(stored[0]) if stored else frames))

    @ray.method(concurrency_group="beat")
    def beat(self) -> None:
        """Renew the lease, and return after a while: calls of other groups may wait for large data."""
        assert self._host is not None
        self._host.receive(())
        self._host.wait(HEARTBEAT_S)

    @ray.method(concurrency_group="take")
    def take(self) -> Any:
        """Wait for frames for the kernel; raise EOFError after the host's end."""
        assert self._host is not None
        frames = self._host.take(TAKE_S)
        if frames is None:
            raise EOFError("the host has ended its workers")
        return pack(frames)
