"""Fixtures for all tests: nothing may be left behind by any of them."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from accel_nb.runtime.process.environment import patch_environment
from tests.realworld.summary import summary_lines

SETTLE_S = 5.0
# jsonschema checks international addresses by it, which no test needs: its grammar takes each process a second.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]


def _shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()


def _descriptors() -> set[str]:
    """Return what this process has open, as far as that shows a leak: sockets, pipes and anonymous files by target."""
    found: set[str] = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.startswith(("socket:", "pipe:", "/memfd:accel_nb")):
            found.add(target)
    return found


def _children(known: frozenset[int] = frozenset()) -> frozenset[int]:
    """Return this process's descendants, without those that a known one started: a pool replaces its workers."""
    found: set[int] = set()
    waiting = _children_of(os.getpid())
    while waiting:
        pid = waiting.pop()
        if pid not in known:
            found.add(pid)
            waiting += _children_of(pid)
    return frozenset(found)


def _children_of(pid: int) -> list[int]:
    """Return the children of all threads of a process, as Linux lists them; none if it has ended."""
    pids: list[int] = []
    for listing in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            pids += map(int, listing.read_text().split())
    return pids


def _environment() -> dict[str, str]:
    """Return the variables, without those that pytest and torch's compiler set for themselves on first use."""
    theirs = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR")
    return {name: value for name, value in os.environ.items() if name not in theirs}


def _threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


def wait_for(condition: Callable[[], object], deadline_s: float = SETTLE_S) -> bool:
    """Look again and again until a condition holds or the deadline passes; returns whether it holds."""
    event, deadline = threading.Event(), time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        event.wait(0.01)
    return True


@pytest.fixture(scope="module")
def one_torch_thread() -> Iterator[None]:
    """Compute in one thread: on a busy machine small operations wait for the others longer than they take."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def processes_can_be_found() -> None:
    """Require that the system lists the children of a process: else no test would find what it leaves behind."""
    assert Path(f"/proc/self/task/{os.getpid()}/children").exists()


def pytest_configure() -> None:
    """Collect no garbage while test modules are imported: collections would look through all of it for nothing."""
    gc.disable()


@pytest.fixture(scope="session", autouse=True)
def imports_are_no_garbage() -> None:
    """Spare every collection what the tests have imported, where it would look a third of a second for nothing."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def records_runs_elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the runs of tests out of the user's registry."""
    with patch_environment(xdg_state_home=tmp_path_factory.mktemp("state")):
        yield


@pytest.fixture(autouse=True)
def leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves processes, threads, variables, sockets, pipes or shared memory."""
    if request.node.get_closest_marker("ui"):
        yield  # the browser and the server outlive single tests
        return
    # A module's shared processes (a kernel, a fork server) belong to its fixtures: they exist before this point.
    before = _children(), _threads(), _environment(), _shared_memory(), _descriptors()
    yield
    children, threads, environment, shared, descriptors = before
    assert _environment() == environment, "environment variables changed"
    checks: dict[str, Callable[[], Collection[object]]] = {
        "processes": lambda: _children(children),
        "threads": lambda: _threads() - threads,
        "/dev/shm": lambda: _shared_memory() - shared,
        "sockets, pipes or anonymous files": lambda: (
            _descriptors() - descriptors if len(_descriptors()) > len(descriptors) else set()
        ),
    }
    for what, left in checks.items():
        assert wait_for(lambda left=left: not left()), f"left behind {what}: {left()}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Count what became of the corpus of real code, where it was run."""
    reports = [report for found in terminalreporter.stats.values() for report in found if hasattr(report, "when")]
    if lines := summary_lines(reports):
        terminalreporter.section("corpus of real code")
        for line in lines:
            terminalreporter.line(line)


@pytest.fixture
def project() -> Path:
    """Return the folder of the repository."""
    return Path(__file__).parents[1]
