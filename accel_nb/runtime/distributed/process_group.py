"""The default process group: opened over a store, shut down from another thread if a rank is blocked, and reopened.

A signal cannot interrupt a rank that waits in a gloo collective, because the wait is in C++; shutting down its
connections can. `DefaultGroup` therefore records which sockets are opened while the group and its subgroups are
created, and `DefaultGroup.shut_down_connections` shuts down exactly these. NCCL communicators are aborted instead.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import re
import socket
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from accel_nb.runtime.devices.registry import device_type, type_of_backend
from accel_nb.runtime.distributed.last_collective import (
    EnteredCollective,
    find_last_collective,
    has_open_collectives,
    next_record_id,
)
from accel_nb.runtime.distributed.memory_exchange import MemoryExchange, create_memory, is_supported
from accel_nb.runtime.distributed.shared_group import original_function
from accel_nb.runtime.process.environment import launch_store
from accel_nb.runtime.world import World

logger = logging.getLogger(__name__)

Store = c10d.Store

DEFAULT_TIMEOUT_S = 1800.0

GLOO_RELEASE_TIMEOUT_S = 2.0
"""Maximum time in which gloo's threads release finished collectives."""

_DESCRIPTORS = "/proc/self/fd"
_KEY_PREFIX = "accel_nb"
"""Prefix of accel_nb's keys in the store."""
_SOCKET = re.compile(r"socket:\[(\d+)\]")
_GROUP_FACTORY = "_new_process_group_helper"  # called by init_process_group, new_group and device meshes


class DefaultGroup:
    """torch's default process group of this process; at most one is open at a time.

    Every rank must call ``open``, ``reopen`` and ``close``; the first two block until all ranks have called.
    ``shut_down_connections`` may be called from any thread, on any rank.
    """

    # The exchange of the open group, with torch's group. A process has one default group, and several objects of this
    # class may represent it (see `adopt`).
    _exchange: ClassVar[tuple[Any, MemoryExchange] | None] = None

    is_interrupted: ClassVar[bool] = False
    """Whether the code of this rank was interrupted since the group was opened: other ranks may be at other steps."""

    def __init__(self, world: World, *, timeout_s: float, owned: bool, backend: str | None = None) -> None:
        self.world = world
        self._timeout_s = timeout_s
        self._is_owner = owned
        self._backend = backend
        self._sockets: set[int] = set()
        self._groups: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
        # The first entry of torch's flight recorder that can belong to the group: it keeps records of earlier groups,
        # which have the same name and whose numbers may differ between ranks that were stopped.
        self._first_record = 0
        self._original_factory: Callable[..., Any] | None = None

    @classmethod
    def open(
        cls, world: World, store: str | os.PathLike[str] | Store, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> DefaultGroup:
        """Open the group over a store of all ranks, or over a file that each can read and write.

        No group may have used the store before; a file may have been used by an earlier group of these ranks.
        """
        group = cls(world, timeout_s=timeout_s, owned=True)
        group._open(store)
        return group

    @classmethod
    def adopt(cls, world: World) -> DefaultGroup:
        """Use the default group that other code has opened; `close` does not close it."""
        return cls(world, timeout_s=DEFAULT_TIMEOUT_S, owned=False)

    @classmethod
    def from_environment(
        cls, world: World, *, timeout_s: float = DEFAULT_TIMEOUT_S, backend: str | None = None
    ) -> DefaultGroup:
        """Open the group that ``torchrun``'s variables describe.

        ``backend`` defaults to the backend of the device type. Ranks that `accel-nb launch` starts on one machine use
        an anonymous file as store instead of a port.
        """
        group = cls(world, timeout_s=timeout_s, owned=True, backend=backend)
        group._open(launch_store())
        if group.backend == "gloo":
            atexit.register(group._close_at_exit, os.getpid())
        return group

    @staticmethod
    def is_open() -> bool:
        """Return whether this process has a default group, opened here or by other code."""
        return dist.is_available() and dist.is_initialized()

    @staticmethod
    def open_backend() -> str:
        """Return the name of the backend of the open default group."""
        return dist.get_backend()

    @classmethod
    def exchange(cls) -> MemoryExchange | None:
        """Return the shared memory through which all ranks exchange small tensors; None if there is none."""
        if cls._exchange is None or cls._exchange[0] is not dist.group.WORLD:
            return None
        return cls._exchange[1]

    @classmethod
    def num_collectives(cls) -> int | None:
        """Return how many collectives this rank has started in the open group; None if its backend does not count."""
        try:
            return int(dist.group.WORLD._get_sequence_number_for_group()) + cls._num_exchanges()  # type: ignore[union-attr]
        except RuntimeError:
            return None

    @classmethod
    def _num_exchanges(cls) -> int:
        exchange = cls.exchange()
        return 0 if exchange is None else exchange.num_exchanges

    @staticmethod
    def world_of_open_group() -> World:
        """Return the world of the open default group, assuming that all ranks are on one machine."""
        rank, size = dist.get_rank(), dist.get_world_size()
        device = DefaultGroup.device_of_open_group(rank)
        return World(rank=rank, size=size, local_rank=rank, local_size=size, device=device)

    @staticmethod
    def device_of_open_group(local_rank: int) -> str:
        """Return the device of a rank of the open default group, of the type that its backend is for."""
        kind = type_of_backend(dist.get_backend())
        return kind.name if kind.is_host else f"{kind.name}:{local_rank % kind.count()}"

    @property
    def backend(self) -> str:
        """The name of torch's backend: the requested one, or the default of this world's device type."""
        if self._backend is not None:
            return self._backend
        return device_type(self.world.device).backend

    def shut_down_connections(self) -> int:
        """Shut down this rank's connections, so that a waiting collective raises; return their number.

        The group cannot be used afterwards: `reopen` or `close` it. No rank should be sending: gloo drops a send over
        a closed connection, and the receiver then waits until the group's timeout.
        """
        if self._is_owner and (exchange := self.exchange()) is not None:
            exchange.leave()
        num_closed = _shut_down(self._sockets)
        if self._is_owner and self.backend == "nccl":
            try:
                c10d._abort_process_group()
            except Exception as error:  # the group may be partly opened or already destroyed: no collective waits
                logger.debug("NCCL group was not aborted: %s", error)
        return num_closed

    def reopen(self, store: str | os.PathLike[str] | Store) -> None:
        """Destroy the group, in any state, and open a new one over a new store or file.

        Every rank must call; none may be in a collective. Collectives that still run in the background are aborted.
        """
        self.shut_down_connections()
        self.close()
        self._open(store)

    @staticmethod
    def set_flag(key: str) -> None:
        """Set a flag for all ranks in the store, which is kept when the group is destroyed; any rank may call."""
        c10d._get_default_store().set(f"{_KEY_PREFIX}/{key}", "1")

    @staticmethod
    def has_flag(key: str) -> bool:
        """Return whether any rank has set this flag, without waiting."""
        return c10d._get_default_store().check([f"{_KEY_PREFIX}/{key}"])

    def last_collective(self) -> EnteredCollective | None:
        """Return the last collective that this rank has entered; None without a record of one. Any thread may call."""
        if not self.is_open():
            return None
        default: Any = dist.group.WORLD
        return find_last_collective(self._first_record, default.group_name, self.exchange())

    def replace_default_group(self) -> None:
        """Replace the default group, opened here or by other code, by a new one; every rank must call.

        Waiting collectives of the old group fail. Flags are lost.
        """
        store, backend = c10d._get_default_store(), dist.get_backend()
        timeout = self._timeout_of_open_group()
        self._timeout_s = timeout.total_seconds()
        has_exchange = self._close_exchange()
        self._first_record = next_record_id()
        if backend == "nccl":
            c10d._abort_process_group()
        else:
            original_function("destroy_process_group")()
        original_function("init_process_group")(
            backend,
            rank=self.world.rank,
            world_size=self.world.size,
            store=dist.PrefixStore("renewed", store),  # pyright: ignore[reportPrivateImportUsage]
            timeout=timeout,
        )
        if has_exchange:
            self._open_exchange()

    def _timeout_of_open_group(self) -> timedelta:
        """Return the timeout of the open group, which other code may have opened.

        The caller has no reference to the group then, which would keep its connections open after it is destroyed.
        """
        opened: Any = dist.group.WORLD
        return opened._get_backend(torch.device(self.world.device)).options._timeout

    def close(self) -> None:
        """Destroy the group and its subgroups; does nothing if it is closed already or was opened by other code."""
        if not self._is_owner:
            return
        atexit.unregister(self._close_at_exit)  # else it would close, at exit, a group that other code has opened since
        self._close_exchange()
        if self._original_factory is not None:
            setattr(c10d, _GROUP_FACTORY, self._original_factory)
            self._original_factory = None
        if dist.is_initialized():
            wait_for_gloo_threads()
            if self.backend == "gloo" and has_open_collectives(self._first_record):
                _keep_until_exit(self._groups)
            try:
                original_function("destroy_process_group")()
            except Exception as error:  # its connections may be shut down; the group is destroyed anyway
                logger.debug("process group did not close cleanly: %s", error)
        self._sockets.clear()
        self._groups.clear()

    def _close_at_exit(self, pid: int) -> None:
        """Close the group before the interpreter exits, so that gloo's threads are idle; do nothing in a fork.

        Connections are shut down first, so that no collective waits for ranks that have ended.
        """
        if os.getpid() == pid:
            self.shut_down_connections()
            self.close()

    def _open(self, store: str | os.PathLike[str] | Store | None) -> None:
        DefaultGroup.is_interrupted = False
        self._record_new_groups()
        self._first_record = next_record_id()
        try:
            if store is None:
                init_options: dict[str, Any] = {"init_method": "env://"}
            elif isinstance(store, str | os.PathLike):
                init_options = {"store": self._file_store(os.fspath(store))}
            else:
                init_options = {"store": store}
            original_function("init_process_group")(
                self.backend,
                rank=self.world.rank,
                world_size=self.world.size,
                timeout=timedelta(seconds=self._timeout_s),
                **init_options,
            )
            if self.backend == "gloo":
                self._open_exchange()
        except BaseException:
            self.close()
            raise

    def _open_exchange(self) -> None:
        """Open the memory of the group's ranks, if all are on this machine; every rank must call, and waits for all."""
        rank, size = self.world.rank, self.world.size
        is_local = self.world.local_size == size > 1 and is_supported(size)
        store, key = c10d._get_default_store(), f"{_KEY_PREFIX}/exchange"
        exchange = None
        with ExitStack() as opened:
            try:
                if is_local and rank == 0:
                    place = ""
                    try:
                        descriptor, path, token = create_memory(size)
                        opened.callback(os.close, descriptor)
                        place = f"{token.hex()} {path}"
                    finally:
                        store.set(key, place)  # the other ranks wait for it
                if is_local:
                    token, _, path = store.get(key).decode().partition(" ")
                    exchange = MemoryExchange(path, bytes.fromhex(token), rank, size, timeout_s=self._timeout_s)
            except OSError as error:  # the ranks are on several machines after all, or may not read each other's files
                logger.debug("no memory for exchanges: %s", error)
            # This wait is needed without an exchange too: an early exit would close connections that others still open.
            has_opened = torch.tensor([exchange is not None], dtype=torch.int32, device="cpu")
            c10d.all_reduce(has_opened, c10d.ReduceOp.MIN)
        if exchange is not None and has_opened.item():
            DefaultGroup._exchange = dist.group.WORLD, exchange

    @classmethod
    def _close_exchange(cls) -> bool:
        """Close the memory of the group's ranks; return whether there was any."""
        held, DefaultGroup._exchange = cls._exchange, None
        if held is not None:
            held[1].close()
        return held is not None

    def _file_store(self, path: str) -> Any:
        """Return a store over a file, with separate keys for each group that is opened over the same file."""
        store = dist.FileStore(path, self.world.size)  # pyright: ignore[reportPrivateImportUsage]
        number = store.add(f"{_KEY_PREFIX}/groups/{self.world.rank}", 1)
        return store if number == 1 else dist.PrefixStore(f"group {number}", store)  # pyright: ignore[reportPrivateImportUsage]

    def _record_new_groups(self) -> None:
        """Record all groups that are created from now on, and their sockets for `shut_down_connections`."""
        make = getattr(c10d, _GROUP_FACTORY)

        def make_and_record(*args: Any, **kwargs: Any) -> Any:
            before = _socket_inodes()
            try:
                made = make(*args, **kwargs)
            finally:
                self._sockets |= _socket_inodes() - before
            if isinstance(made[0], dist.ProcessGroup):  # a rank that is not in the group gets a number
                self._groups.add(made[0])
            return made

        self._original_factory = make
        setattr(c10d, _GROUP_FACTORY, make_and_record)


def _keep_until_exit(groups: Iterable[dist.ProcessGroup]) -> None:
    """Keep groups in memory until the process ends.

    The destructor of a group waits for its collectives. gloo does not end one that was sending when the connection was
    shut down, so that the destructor would return only after the group's timeout. The count of references is increased,
    since the interpreter destroys the values of module variables when it exits.
    """
    for group in groups:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def wait_for_gloo_threads() -> None:
    """Wait until gloo's threads have released the collectives that have ended.

    A gloo thread needs the GIL to release a collective. If the interpreter has exited by then, the process crashes; if
    a caller that holds the GIL destroys the group, as DDP does, the two threads deadlock.
    """
    deadline = time.monotonic() + GLOO_RELEASE_TIMEOUT_S
    before = None
    while (now := _gloo_threads()) and time.monotonic() < deadline:
        if now == before and all(state == "S" for state, _ in now.values()):
            return
        before = now
        time.sleep(0.001)  # sleep releases the GIL, which these threads need


def _gloo_threads() -> dict[str, tuple[str, str]]:
    """Return state and number of voluntary context switches of each gloo thread that runs collectives."""
    found: dict[str, tuple[str, str]] = {}
    for path in Path("/proc/self/task").glob("*/status"):
        try:
            status = dict(line.split(":", 1) for line in path.read_text(errors="replace").splitlines())
        except OSError:  # the thread has ended since it was listed
            continue
        if status["Name"].strip() == "pt_gloo_runloop":
            found[path.parent.name] = status["State"].split()[0], status["voluntary_ctxt_switches"]
    return found


def _socket_inodes() -> set[int]:
    return {inode for _, inode in _open_sockets()}


def _open_sockets() -> list[tuple[int, int]]:
    """Return descriptor and inode of every open socket; an empty list if the system has no /proc."""
    try:
        descriptors = os.listdir(_DESCRIPTORS)
    except OSError:
        return []
    found: list[tuple[int, int]] = []
    for descriptor in descriptors:
        try:
            match = _SOCKET.match(os.readlink(f"{_DESCRIPTORS}/{descriptor}"))
        except OSError:  # closed since it was listed
            continue
        if match:
            found.append((int(descriptor), int(match[1])))
    return found


def _shut_down(inodes: set[int]) -> int:
    """Shut down the connected internet sockets among ``inodes``, without closing descriptors; return their number."""
    count = 0
    for descriptor, inode in _open_sockets():
        if inode not in inodes:
            continue
        try:
            copy = os.dup(descriptor)
        except OSError:
            continue
        # The descriptor's number may have been reused since it was listed; the copy is stable.
        if os.fstat(copy).st_ino != inode:
            os.close(copy)
            continue
        with socket.socket(fileno=copy) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and not _is_listening(connection):
                try:
                    connection.shutdown(socket.SHUT_RDWR)
                    count += 1
                except OSError:  # the peer has closed it
                    continue
    return count


def _is_listening(connection: socket.socket) -> bool:
    """Return whether a socket accepts connections: these stay open, as gloo ends the process if accepting fails."""
    return bool(connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
