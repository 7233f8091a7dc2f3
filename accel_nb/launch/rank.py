"""The program of each rank's process: runs the unchanged script or module with the options of the launch.

Run as ``python -m accel_nb.launch.rank TASK [ARGUMENT...]``. At SIGTERM a script with a folder for checkpoints saves
and stops at the end of its step; without one, or if it runs no steps, KeyboardInterrupt is raised. So it is in the cell
of a notebook, whose outputs are then written.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import FrameType, TracebackType
from typing import Any

from accel_nb.config import Layer, resolve, using_layers
from accel_nb.errors import AccelNbError, error_text
from accel_nb.launch.rank_task import ENDED, FINISHING, HANDLING, RankTask
from accel_nb.launch.run_log import RunLog
from accel_nb.launch.stall_reporter import StallReporter
from accel_nb.runtime.process.built_accelerators import record_built_accelerators
from accel_nb.runtime.process.environment import get_variable, torchrun_world
from accel_nb.telemetry.events import current_sink

_PR_SET_PDEATHSIG = 1


class RankProgram:
    """Runs a task in this process."""

    def __init__(self, task: RankTask, args: Sequence[str]) -> None:
        self._task = task
        self._args = list(args)
        self._world = torchrun_world()
        self._accelerators: list[Any] = []
        self._signal: int | None = None

    def run(self) -> int:
        """Run the target to its end and return the exit code of this process."""
        is_main = self._world is None or self._world.is_main
        if self._task.location_file is not None and self._world is not None and self._world.size > 1:
            StallReporter(self._task.location_file, self._world).start()
        with ExitStack() as stack:
            stack.enter_context(using_layers(self._layers()))
            self._accelerators = stack.enter_context(record_built_accelerators())
            run_log = RunLog(self._task.folder, self._world)
            token = current_sink.set(run_log)
            stack.callback(current_sink.reset, token)
            stack.callback(run_log.close)
            try:
                code = self._run_target()
                # A rank that exits with an error must not wait: the others may not reach their end.
                open_accelerators = [] if code else [item for item in self._accelerators if not item.is_closed]
                lines = [line for item in open_accelerators for line in item.end_run()]
            except KeyboardInterrupt:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                self._write_report(ENDED)
                lines = [
                    line for item in self._accelerators if not item.is_closed for line in item.end_interrupted_run()
                ]
                code = 128 + (self._signal or signal.SIGINT)
            except BaseException as error:
                self._report(error)
                return 1
            if is_main:
                for line in lines:
                    print(line, file=sys.stderr)
        return code

    def _layers(self) -> list[Layer]:
        layers = list(self._task.layers)
        restart = int(get_variable("TORCHELASTIC_RESTART_COUNT", "0"))
        if restart and resolve(layers).config.checkpoint.dir is not None:
            layers.append(Layer("flags", {"checkpoint.resume": "auto"}, f"restart {restart}"))
        return layers

    def _run_target(self) -> int:
        name = self._task.name
        sys.argv = [name, *self._args]
        sys.path[0] = os.getcwd() if self._task.kind == "module" else os.path.dirname(os.path.abspath(name))
        signal.signal(signal.SIGTERM, self._finish)
        _reset_in_forked_processes(self._finish)
        if self._task.kind == "notebook":
            from accel_nb.launch.notebook import run_notebook

            return run_notebook(name, out=self._task.out)
        try:
            if self._task.kind == "module":
                runpy.run_module(name, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(name, run_name="__main__")
        except SystemExit as end:
            return _exit_code(end)
        return 0

    def _finish(self, signum: int, frame: FrameType | None) -> None:
        self._signal = signum
        # A list, since `any` of a generator would not call all of them.
        accepted = [item.request_stop() for item in self._accelerators]
        if not any(accepted):
            self._write_report(HANDLING)
            raise KeyboardInterrupt
        self._write_report(FINISHING)

    def _write_report(self, text: bytes) -> None:
        if self._task.report_file is not None:
            os.write(self._task.report_file, text)

    def _report(self, error: BaseException) -> None:
        """Report an error to the launcher, to the elastic agent, or on the terminal."""
        text = "".join(traceback.format_exception(type(error), error, _drop_launcher_frames(error.__traceback__)))
        if isinstance(error, AccelNbError) and self._task.kind == "notebook":
            text = f"{type(error).__name__}: {error}\n"
        if self._task.report_file is not None:
            report = {
                "type": type(error).__name__,
                "message": error_text(error),
                "traceback": text,
                "time": time.time(),
            }
            os.write(self._task.report_file, json.dumps(report).encode())
            return
        if get_variable("TORCHELASTIC_ERROR_FILE", ""):
            from accel_nb.runtime.distributed.elastic import record_failure

            record_failure(error)
        head = "" if self._world is None else f"rank {self._world.rank} of {self._world.size} raised:\n"
        print(f"{head}{text}", end="", file=sys.stderr, flush=True)


def _reset_in_forked_processes(handler: Callable[[int, FrameType | None], None]) -> None:
    """Make SIGTERM end the processes that the target forks, if they have inherited the handler.

    Python discards signals that arrive between the fork and its own code after it: SIGTERM is blocked meanwhile.
    """
    before = threading.local()

    def block() -> None:
        before.mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before.mask)

    def reset() -> None:
        if signal.getsignal(signal.SIGTERM) == handler:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        unblock()

    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=reset)


def _exit_code(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return int(end.code or 0)
    print(end.code, file=sys.stderr)
    return 1


def _drop_launcher_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback that starts at the first frame of the user's code."""
    kept = trace
    while kept is not None and kept.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        kept = kept.tb_next
    return kept or trace


def _end_with_parent(expected: int | None) -> None:
    """Make the system kill this process when its parent ends for any reason."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if expected is not None and os.getppid() != expected:
        sys.exit(1)  # the parent ended before the line above took effect


def main() -> int:
    """Run the task of the command line; return the exit code."""
    task = RankTask.from_json(sys.argv[1])
    if task.parent is not None or get_variable("TORCHELASTIC_ERROR_FILE", ""):
        _end_with_parent(task.parent)
    faulthandler.enable()
    try:
        return RankProgram(task, sys.argv[2:]).run()
    finally:
        if "torch.distributed" in sys.modules:  # the script may have opened a process group itself
            from accel_nb.runtime.distributed.process_group import wait_for_gloo_threads

            wait_for_gloo_threads()


if __name__ == "__main__":
    sys.exit(main())
