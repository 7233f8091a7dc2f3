"""The process group: opened over a file, cut from another thread when a rank is blocked, and opened again.

A rank that waits in a gloo collective cannot be woken by a signal: the wait is in C++. What wakes it is the end of its
connections. So the group remembers which sockets appeared while it and its subgroups were made, and `Group.cut`
shuts down exactly those. NCCL communicators are aborted instead.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import re
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from accel_nb.runtime.devices.registry import device_type, type_of_backend
from accel_nb.runtime.distributed.shared_group import original
from accel_nb.runtime.process.environment import launch_store
from accel_nb.runtime.world import World

logger = logging.getLogger(__name__)

DEFAULT_TIMEOUT_S = 1800.0

SETTLE_S = 2.0
"""How long threads of the backend may take to let go of what has ended."""

_DESCRIPTORS = "/proc/self/fd"
_NOTES = "accel_nb/notes"
_SOCKET = re.compile(r"socket:\[(\d+)\]")
_MAKER = "_new_process_group_helper"  # what init_process_group, new_group and device meshes all end in


class Group:
    """torch's default process group of this process; at most one is open at a time.

    Every rank must call ``open``, ``reopen`` and ``close``; the first two block until all ranks have come. ``cut`` may
    be called from any thread, on any rank.
    """

    def __init__(self, world: World, *, timeout_s: float, owned: bool, backend: str | None = None) -> None:
        self.world = world
        self._timeout_s = timeout_s
        self._owned = owned
        self._backend = backend
        self._sockets: set[int] = set()
        # When the group was opened, as torch's record of collectives tells time.
        self._opened_ns = 0
        self._make: Callable[..., Any] | None = None

    @classmethod
    def open(cls, world: World, store_path: str | os.PathLike[str], *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Group:
        """Open the group over a file that every rank can reach and that nobody has used before."""
        group = cls(world, timeout_s=timeout_s, owned=True)
        group._open(os.fspath(store_path))
        return group

    @classmethod
    def adopt(cls, world: World) -> Group:
        """Take the default group that somebody else has opened; closing leaves it open."""
        return cls(world, timeout_s=DEFAULT_TIMEOUT_S, owned=False)

    @classmethod
    def from_environment(
        cls, world: World, *, timeout_s: float = DEFAULT_TIMEOUT_S, backend: str | None = None
    ) -> Group:
        """Open the group that ``torchrun``'s variables describe; without ``backend`` the device's own.

        Ranks that `accel-nb launch` has started on one machine meet over an anonymous file and listen nowhere.
        """
        group = cls(world, timeout_s=timeout_s, owned=True, backend=backend)
        group._open(launch_store())
        if group.backend == "gloo":
            atexit.register(group._end_with_process, os.getpid())
        return group

    @staticmethod
    def is_open() -> bool:
        """Whether this process has a default group, whoever opened it."""
        return dist.is_available() and dist.is_initialized()

    @staticmethod
    def name_of_open() -> str:
        """Return the name of the backend of the open default group."""
        return dist.get_backend()

    @staticmethod
    def world_of_open() -> World:
        """Return the world of the default group that somebody has opened, taken to be on one machine."""
        rank, size = dist.get_rank(), dist.get_world_size()
        kind = type_of_backend(dist.get_backend())
        device = kind.name if kind.is_host else f"{kind.name}:{rank % kind.count()}"
        return World(rank=rank, size=size, local_rank=rank, local_size=size, device=device)

    @property
    def backend(self) -> str:
        """The name of torch's backend: that which was asked for, or that of this world's device."""
        if self._backend is not None:
            return self._backend
        return device_type(self.world.device).backend

    def cut(self) -> int:
        """End this rank's connections, so that whatever waits in a collective raises; returns how many there were.

        The group is of no use afterwards: `reopen` or `close` it. The ranks should stand still: gloo drops a send whose
        write meets a closed connection, and what waits for that send waits until the group's time is up.
        """
        cut = _shut_down(self._sockets)
        if self._owned and self.backend == "nccl":
            try:
                c10d._abort_process_group()
            except Exception as error:  # it may be half open or gone already: there is nothing left to wake
                logger.debug("NCCL group was not aborted: %s", error)
        return cut

    def reopen(self, store_path: str | os.PathLike[str]) -> None:
        """Throw the group away, whatever its state, and open a new one over a new file.

        Every rank must call; none may be in a collective any more, and those that run on behind it are cut.
        """
        self.cut()
        self.close()
        self._open(os.fspath(store_path))

    @staticmethod
    def note(key: str) -> None:
        """Leave a note for the other ranks, which outlives the group; any rank may."""
        c10d._get_default_store().set(f"{_NOTES}/{key}", "1")

    @staticmethod
    def has_note(key: str) -> bool:
        """Whether any rank left this note; does not wait."""
        return c10d._get_default_store().check([f"{_NOTES}/{key}"])

    def last_collective(self) -> dict[str, Any] | None:
        """Return group, sequence number, operation and sizes of the last collective that this rank has entered.

        And whether it is open, which none of an earlier group is, and whether it is one of all ranks.
        From torch's own record of them; None where this torch keeps none for the backend. May be asked in any thread.
        """
        last = _last_record() if self.is_open() else None
        if last is None:
            return None
        return {
            "group": last["process_group"][0],
            "sequence": last["collective_seq_id"],
            "operation": last["profiling_name"].partition(":")[2] or last["profiling_name"],
            "sizes": last["input_sizes"],
            "is_open": last.get("retired") is False and last["time_created_ns"] > self._opened_ns,
            "is_of_all": last["process_group"][1] == "default_pg",
        }

    def renew(self) -> None:
        """Throw the default group away, whoever opened it, and open one in its place; every rank must call.

        What another rank waits for in the old group fails there. Notes are forgotten.
        """
        store, backend = c10d._get_default_store(), dist.get_backend()
        self._opened_ns = time.time_ns()
        if backend == "nccl":
            c10d._abort_process_group()
        else:
            original("destroy_process_group")()
        original("init_process_group")(
            backend,
            rank=self.world.rank,
            world_size=self.world.size,
            store=dist.PrefixStore("renewed", store),  # pyright: ignore[reportPrivateImportUsage]
            timeout=timedelta(seconds=self._timeout_s),
        )

    def close(self) -> None:
        """Throw the group and its subgroups away; does nothing when that has happened, or the group is not ours."""
        if not self._owned:
            return
        atexit.unregister(self._end_with_process)  # what is open at the end may be somebody else's
        if self._make is not None:
            setattr(c10d, _MAKER, self._make)
            self._make = None
        if dist.is_initialized():
            settle()
            try:
                original("destroy_process_group")()
            except Exception as error:  # after a cut a backend may fail to say goodbye; the group is gone all the same
                logger.debug("process group did not close cleanly: %s", error)
        self._sockets.clear()

    def _end_with_process(self, pid: int) -> None:
        """Leave gloo's threads with nothing to do before the interpreter ends; a forked copy has no part in it.

        Cut first, so that nobody waits for what other ranks will not send any more.
        """
        if os.getpid() == pid:
            self.cut()
            self.close()

    def _open(self, store_path: str | None) -> None:
        self._follow_new_groups()
        self._opened_ns = time.time_ns()
        try:
            if store_path is None:
                where: dict[str, Any] = {"init_method": "env://"}
            else:
                where = {"store": self._file_store(store_path)}
            original("init_process_group")(
                self.backend,
                rank=self.world.rank,
                world_size=self.world.size,
                timeout=timedelta(seconds=self._timeout_s),
                **where,
            )
            if self.backend == "gloo":  # a rank that ends at once would cut off those that still connect
                c10d.barrier()
        except BaseException:
            self.close()
            raise

    def _file_store(self, path: str) -> Any:
        """Return a store over a file; each group that is opened over the same one sees keys of its own only."""
        store = dist.FileStore(path, self.world.size)  # pyright: ignore[reportPrivateImportUsage]
        number = store.add(f"{_NOTES}/groups/{self.world.rank}", 1)
        return store if number == 1 else dist.PrefixStore(f"group {number}", store)  # pyright: ignore[reportPrivateImportUsage]

    def _follow_new_groups(self) -> None:
        """Add the sockets of every group that is made from now on, subgroups included, to those that `cut` ends."""
        make = getattr(c10d, _MAKER)

        def make_and_remember(*args: Any, **kwargs: Any) -> Any:
            before = _socket_inodes()
            try:
                return make(*args, **kwargs)
            finally:
                self._sockets |= _socket_inodes() - before

        self._make = make
        setattr(c10d, _MAKER, make_and_remember)


def settle() -> None:
    """Wait until gloo's threads have let go of the collectives that have ended.

    A thread takes the interpreter's lock to let go of one. Where the interpreter has ended by then, this ends the
    process; where a group is freed by who holds the lock, as DDP does, each waits for the other.
    """
    deadline = time.monotonic() + SETTLE_S
    before = None
    while (now := _gloo_threads()) and time.monotonic() < deadline:
        if now == before and all(state == "S" for state, _ in now.values()):
            return
        before = now
        time.sleep(0.001)  # without the lock, which is what they need


def _last_record() -> dict[str, Any] | None:
    """Return the newest entry of torch's own record of collectives; None where there is none."""
    dump = getattr(sys.modules.get("torch._C._distributed_c10d"), "_dump_fr_trace_json", None)
    entries = [] if dump is None else json.loads(dump(True, False)).get("entries") or []
    return max(entries, key=lambda entry: entry["record_id"], default=None)


def _gloo_threads() -> dict[str, tuple[str, str]]:
    """Return for each of gloo's threads that work on collectives its state, and how often it has slept."""
    found: dict[str, tuple[str, str]] = {}
    for path in Path("/proc/self/task").glob("*/status"):
        try:
            told = dict(line.split(":", 1) for line in path.read_text(errors="replace").splitlines())
        except OSError:  # it has ended since it was listed
            continue
        if told["Name"].strip() == "pt_gloo_runloop":
            found[path.parent.name] = told["State"].split()[0], told["voluntary_ctxt_switches"]
    return found


def _socket_inodes() -> set[int]:
    return {inode for _, inode in _open_sockets()}


def _open_sockets() -> list[tuple[int, int]]:
    """Return descriptor and inode of every open socket; nothing where the system has no /proc."""
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
    """Shut down the connected internet sockets among ``inodes``; the descriptors stay open, with their owner."""
    count = 0
    for descriptor, inode in _open_sockets():
        if inode not in inodes:
            continue
        try:
            copy = os.dup(descriptor)
        except OSError:
            continue
        # The number may have been given to another file since it was listed: the copy cannot change any more.
        if os.fstat(copy).st_ino != inode:
            os.close(copy)
            continue
        with socket.socket(fileno=copy) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and not _is_listening(connection):
                try:
                    connection.shutdown(socket.SHUT_RDWR)
                    count += 1
                except OSError:  # the other side was faster
                    continue
    return count


def _is_listening(connection: socket.socket) -> bool:
    """Whether a socket waits for connections: gloo ends the process when accepting fails, so these stay."""
    return bool(connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
