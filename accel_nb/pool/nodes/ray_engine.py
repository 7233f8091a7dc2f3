"""Workers on the nodes of a Ray cluster: on each, one actor hosts the local engine."""

from __future__ import annotations

import json
import logging
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib import import_module
from typing import Any

from accel_nb.config.engine_section import EngineOptions
from accel_nb.errors import ConfigError, PoolError
from accel_nb.pool.engine import EngineRequest
from accel_nb.pool.nodes.engine import NodesEngine
from accel_nb.pool.nodes.frames import Frame, join
from accel_nb.pool.nodes.host import HostSettings, describe_differences, own_versions, with_hash_seed
from accel_nb.pool.nodes.ray_frames import INLINE_BYTES, StoredPayloads, unpack
from accel_nb.runtime.process.environment import get_variable, set_variables, unchanged_environment

START_TIMEOUT_S = 60.0
INSTALL = 'pip install "accel_nb[ray]"'
_RECONNECT, _FOR_EVER_S = "RAY_gcs_rpc_server_reconnect_timeout_s", "2000000"
"""After this time without the head Ray ends the process, which is the kernel; by default after 60 seconds."""
_TOKEN = "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN, or the file ~/.ray/auth_token"


class RayLink:
    """The kernel's end of the connection to one actor."""

    def __init__(self, ray: Any, actor: Any, name: str, stored: StoredPayloads) -> None:
        self.name = name
        self._ray, self._actor, self._stored = ray, actor, stored
        self._is_closed = threading.Event()
        self._frames, self._beat = actor.take.remote(), actor.beat.remote()
        self._unreceived: deque[tuple[Any, Frame]] = deque()
        """The calls that send large frames, in their order."""

    def send(self, frames: Sequence[Frame]) -> None:
        """Send frames with actor calls, which are executed in order.

        Ray delays all calls after one whose argument is large until that has arrived, so it gets a reference.
        """
        if self._is_closed.is_set():
            return
        small: list[Frame] = []
        for frame in frames:
            if frame.num_bytes <= INLINE_BYTES:
                small.append(frame)
                continue
            self._send_small(small)
            small = []
            self._unreceived.append((self._actor.receive.remote(None, [self._stored.put(frame)]), frame))
        self._send_small(small)

    def _send_small(self, frames: Sequence[Frame]) -> None:
        if frames:
            self._actor.receive.remote(join(frames))

    def unreceived_bytes(self) -> int:
        """Return the size of the frames in the object store that the actor has not yet fetched."""
        while self._unreceived and self._ray.wait([self._unreceived[0][0]], timeout=0)[0]:
            self._stored.forget(self._unreceived.popleft()[1])
        return sum(frame.num_bytes for _, frame in tuple(self._unreceived))

    def beat(self) -> None:
        """Do nothing: one call of the actor's ``beat`` is always under way."""

    def receive(self) -> list[Frame] | None:
        """Wait for frames or a heartbeat; None when the actor has ended."""
        try:
            ready, _ = self._ray.wait([self._frames, self._beat])
            if self._is_closed.is_set():
                return None
            if self._frames in ready:
                value = self._ray.get(self._frames)
                self._frames = self._actor.take.remote()
                return unpack(value)
            self._ray.get(self._beat)
            self._beat = self._actor.beat.remote()
        except (EOFError, self._ray.exceptions.RayError):
            return None
        return []

    def close(self) -> None:
        """Kill the actor."""
        if not self._is_closed.is_set():
            self._is_closed.set()
            with suppress(self._ray.exceptions.RayError):
                self._ray.kill(self._actor)

    def release(self) -> None:
        """Do nothing: references are freed with this object."""


def start_ray_engine(request: EngineRequest) -> NodesEngine:
    """Join a Ray cluster and start a host on each of the nodes that the options ask for.

    Raise ConfigError, with the remedy, if that is not possible; nothing is left running then.
    """
    options = request.options
    # Ray reads it when it is first used in a process.
    with unchanged_environment():
        set_variables({_RECONNECT: _FOR_EVER_S})
        ray = _import_ray()
        joined = _join(ray, options)
    actors: list[Any] = []
    try:
        nodes = _choose_nodes(ray, options)
        actors = [_start_actor(ray, node, options) for node in nodes]
        check_versions(ray, actors, nodes)
        overrides = with_hash_seed(request.overrides)
        own_node = ray.get_runtime_context().get_node_id()
        settings = [
            HostSettings(
                program=request.program,
                preload=tuple(request.preload),
                node=number,
                address=nodes[0]["NodeManagerAddress"],
                own_address=node["NodeManagerAddress"],
                lease_s=options.lease_s,
                overrides=overrides,
                is_local=node["NodeID"] == own_node,
            )
            for number, node in enumerate(nodes)
        ]
        ray.get(
            [actor.start.remote(json.dumps(asdict(own))) for actor, own in zip(actors, settings, strict=True)],
            timeout=START_TIMEOUT_S,
        )
    except BaseException:
        for actor in actors:
            ray.kill(actor)
        if joined:
            ray.shutdown()
        raise
    stored = StoredPayloads(ray)
    links = [RayLink(ray, actor, node["NodeManagerAddress"], stored) for actor, node in zip(actors, nodes, strict=True)]
    return NodesEngine(links, lost_after_s=options.lost_after_s, on_stop=ray.shutdown if joined else lambda: None)


def _import_ray() -> Any:
    try:
        return import_module("ray")
    except ImportError:
        raise ConfigError(f"--engine ray needs the package ray, which is not installed here; {INSTALL}") from None


def _join(ray: Any, options: EngineOptions) -> bool:
    """Connect this process to the cluster, unless the notebook has done so; return whether this call did."""
    address = options.address or get_variable("RAY_ADDRESS", "auto")
    if address.startswith("ray://"):
        raise ConfigError(
            f"--engine.address {address}: Ray Client is too slow for this; join this machine to the cluster with "
            "`ray start --address HOST:6379 --num-cpus 0 --num-gpus 0`, and leave the option out"
        )
    if get_variable("RAY_AUTH_MODE", "").lower() != "token" and not options.insecure:
        raise ConfigError(
            "the cluster would be joined without a token, and any process that reaches its ports can run code on every "
            f"node; start Ray and this notebook with {_TOKEN}, or give --insecure in a network of your own"
        )
    if ray.is_initialized():
        return False
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
    except ray.exceptions.AuthenticationError as error:
        raise ConfigError(f"Ray refused the token: {_first_line(error)}; set {_TOKEN}, as on the cluster") from None
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise ConfigError(
            f"no Ray cluster was joined at {address!r}: {_first_line(error)}. Start one with `ray start --head`, or "
            f"give --engine.address HOST:PORT; a cluster with a token needs the same one here: {_TOKEN}"
        ) from None
    return True


def _choose_nodes(ray: Any, options: EngineOptions) -> list[dict[str, Any]]:
    """Return the nodes to use, the kernel's first if it has processors for workers."""
    own = ray.get_runtime_context().get_node_id()
    found = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]
    found.sort(key=lambda node: (node["NodeID"] != own, node["NodeManagerAddress"], node["NodeID"]))
    if len(found) < options.nodes:
        names = ", ".join(node["NodeManagerAddress"] for node in found) or "none"
        raise ConfigError(
            f"--nodes {options.nodes} was requested, and the cluster has {len(found)} with processors ({names}); ask "
            "for fewer, or join more with `ray start --address HOST:6379`"
        )
    return found[: options.nodes]


def _start_actor(ray: Any, node: dict[str, Any], options: EngineOptions) -> Any:
    from accel_nb.pool.nodes.ray_host import RayHost

    strategy = import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
    remote = ray.remote(concurrency_groups={"send": 1, "take": 1, "beat": 1})(RayHost)
    placed = remote.options(
        num_cpus=1,
        num_gpus=int(node["Resources"].get("GPU", 0)),
        max_restarts=0,
        scheduling_strategy=strategy(node["NodeID"], soft=False),
    )
    return placed.remote()


def check_versions(ray: Any, actors: Sequence[Any], nodes: Sequence[dict[str, Any]]) -> None:
    """Raise ConfigError if accel_nb cannot be started on a node, or the node has other versions than this machine."""
    own = own_versions()
    for actor, node in zip(actors, nodes, strict=True):
        name = node["NodeManagerAddress"]
        try:
            found = json.loads(ray.get(actor.versions.remote(), timeout=START_TIMEOUT_S))
        except ray.exceptions.GetTimeoutError:
            raise PoolError(
                f"node {name} did not start a process within {START_TIMEOUT_S:g} s; `ray status` shows whether its "
                "processors and GPUs are in use"
            ) from None
        except ray.exceptions.RayError as error:
            problem = "has no accel_nb" if "accel_nb" in str(error) else f"cannot start accel_nb ({_first_line(error)})"
            raise ConfigError(f"node {name} {problem}; on the node: {INSTALL}") from None
        if problem := describe_differences(name, found, own):
            raise ConfigError(problem)


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__
