"""The stack that a worker writes on a signal, while its threads run."""

from __future__ import annotations

import subprocess
import sys

BUSY_THREADS = """
import os, sys, threading, time, traceback
from accel_nb.pool.local.worker import TRACE_SIGNAL, write_stack_on_signal

write_stack_on_signal(1)
main, own = threading.main_thread().ident, os.getpid()

def recurse(depth):
    return recurse(depth - 1) if depth else os.stat("/")

def watch():
    while True:
        traceback.extract_stack(sys._current_frames()[main])

threading.Thread(target=watch, daemon=True).start()
sender = os.fork()
if sender == 0:
    for _ in range(4000):
        os.kill(own, TRACE_SIGNAL)
        time.sleep(0.0003)
    os._exit(0)
while os.waitpid(sender, os.WNOHANG) == (0, 0):
    recurse(30)
"""


def test_a_process_whose_threads_run_survives_writing_its_stack() -> None:
    ended = subprocess.run([sys.executable, "-c", BUSY_THREADS], capture_output=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert b"in recurse" in ended.stdout
