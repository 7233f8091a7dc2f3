"""Running a function on real ranks: forked from a clean helper that has imported torch once.

The helper is this file run as a program. It has one thread, so that forking it is safe; each rank opens a gloo group
over a file and sends what the function returns, pickled, through a pipe.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import importlib.util
import io
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

_TAIL = 4000


class RankError(AssertionError):
    """A rank raised, died or did not finish; the message holds every rank's error and output."""


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 150) -> list[Any]:
    """Call ``fn(world, *args)`` on ``world_size`` processes with an open group; return the results by rank.

    ``fn`` is a top-level function of a test module; arguments and results are picklable.
    """
    return _launcher().run(fn, world_size, args, timeout_s)


def start_launcher() -> None:
    """Start the helper, which else the first `run_ranks` does; it ends with this process."""
    _launcher()


@functools.cache
def _launcher() -> Launcher:
    launcher = Launcher()
    atexit.register(launcher.close)
    return launcher


class Launcher:
    """The test process's end of the helper."""

    def __init__(self) -> None:
        self._connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
                stdin=subprocess.DEVNULL,
            )

    def run(self, fn: Callable[..., Any], world_size: int, args: tuple[Any, ...], timeout_s: float) -> list[Any]:
        """See `run_ranks`."""
        request = (sys.path, fn.__module__, fn.__qualname__, world_size, pickle.dumps(args), timeout_s)
        self._connection.send(request)
        if not self._connection.poll(timeout_s + 30):
            raise RankError("the rank helper does not answer")
        outcomes = self._connection.recv()
        if all(kind == "done" for kind, _, _ in outcomes):
            return [pickle.loads(value) for _, value, _ in outcomes]
        lines = [
            f"--- rank {rank}: {kind}\n{value if kind == 'raised' else ''}{output}"
            for rank, (kind, value, output) in enumerate(outcomes)
        ]
        raise RankError("\n".join(lines))

    def close(self) -> None:
        """End the helper."""
        self._connection.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _serve(connection: Connection) -> None:
    # Imported once, before any rank is forked; the compiler since every optimizer's first step imports it.
    gc.disable()  # until a module of tests is imported too: collections would look through all of this for nothing
    import torch
    import torch._dynamo

    from accel_nb.config.layers import resolve
    from accel_nb.strategies import StrategyRegistry

    importlib.import_module("accel_nb.accelerator")
    if importlib.util.find_spec("deepspeed") is not None:  # which takes seconds; the tests of XLA have none
        importlib.import_module("accel_nb.strategies.deepspeed.engine")
    for strategy in StrategyRegistry().names:
        StrategyRegistry().get(strategy)

    resolve([])  # builds the validators
    torch.set_num_threads(1)
    while True:
        try:
            sys_path, module, name, size, args, timeout_s = connection.recv()
        except EOFError:
            return
        sys.path[:] = sys_path
        if module not in sys.modules:
            importlib.import_module(module)  # here and not in each of its ranks, which are very many
            gc.collect()
            gc.freeze()  # else a collection in a rank copies all that the ranks share
            gc.enable()
            assert len(os.listdir("/proc/self/task")) == 1, f"{module} starts threads: no rank can be forked after that"
        with tempfile.TemporaryDirectory(prefix="accel_nb_ranks_") as folder:
            connection.send(_run(connection, module, name, size, args, timeout_s, Path(folder)))


def _run(
    connection: Connection, module: str, name: str, size: int, args: bytes, timeout_s: float, folder: Path
) -> list[tuple[str, Any, str]]:  # fmt: skip
    pids: list[int] = []
    pipes: list[Connection] = []
    for rank in range(size):
        ours, theirs = Pipe(duplex=False)
        pid = os.fork()
        if pid == 0:
            connection.close()
            _be_rank(theirs, module, name, rank, size, args, folder)
        theirs.close()
        pids.append(pid)
        pipes.append(ours)
    answers: dict[int, tuple[str, Any]] = {}
    deadline = time.monotonic() + timeout_s
    while len(answers) < size:
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in answers]
        ready = wait([*waiting, connection], max(0, deadline - time.monotonic()))
        if not ready or connection in ready:  # too late, or the tests are gone
            break
        for pipe in ready:
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                answers[rank] = pipe.recv()  # type: ignore[union-attr]
            except EOFError:
                answers[rank] = ("died", b"")
        if any(kind != "done" for kind, _ in answers.values()):
            deadline = min(deadline, time.monotonic() + 3)  # the others wait for it: give them a moment
    for rank, pid in enumerate(pids):
        if rank not in answers:
            os.kill(pid, signal.SIGKILL)
    for pid in pids:
        os.waitpid(pid, 0)
    outcomes = [answers.get(rank, ("killed: it did not finish in time", b"")) for rank in range(size)]
    return [(kind, value, _tail(folder / f"{rank}.log")) for rank, (kind, value) in enumerate(outcomes)]


def _tail(path: Path) -> str:
    return path.read_text(errors="replace")[-_TAIL:] if path.exists() else ""


def _be_rank(pipe: Connection, module: str, name: str, rank: int, size: int, args: bytes, folder: Path) -> None:
    log = os.open(folder / f"{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), write_through=True)
    code = 1
    try:
        import faulthandler

        import torch

        from accel_nb.runtime.distributed.process_group import DefaultGroup
        from accel_nb.runtime.world import World

        faulthandler.enable(log)
        # As a worker does: else torch makes its pool anew in the first threads that compute, which race for it.
        torch.set_num_threads(1)
        world = World(rank=rank, size=size, local_rank=rank, local_size=size)
        fn: Any = functools.reduce(getattr, name.split("."), importlib.import_module(module))
        group = DefaultGroup.open(world, folder / "store", timeout_s=60)
        value = pickle.dumps(fn(world, *pickle.loads(args)))
        group.close()
        pipe.send(("done", value))
        code = 0
    except BaseException:
        pipe.send(("raised", traceback.format_exc()))
    finally:
        os._exit(code)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    _serve(Connection(int(sys.argv[1])))
