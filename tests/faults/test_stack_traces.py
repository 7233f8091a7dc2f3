"""The stack that a worker writes on a signal, while its threads run."""

from __future__ import annotations

import subprocess
import sys

BUSY_THREADS = """
import os, threading, time
from accel_nb.pool.local.worker import TRACE_SIGNAL, write_stack_on_signal

write_stack_on_signal(1)
own = os.getpid()

def recurse(depth):
    return recurse(depth - 1) if depth else os.stat("/")

def work():
    while True:
        recurse(30)

for _ in range(3):
    threading.Thread(target=work, daemon=True).start()
sender = os.fork()
if sender == 0:
    for _ in range(4000):
        os.kill(own, TRACE_SIGNAL)
        time.sleep(0.0003)
    os._exit(0)
while os.waitpid(sender, os.WNOHANG) == (0, 0):
    os.stat("/")
"""


def test_a_process_whose_threads_run_survives_writing_its_stack() -> None:
    ended = subprocess.run([sys.executable, "-c", BUSY_THREADS], capture_output=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert b"in <module>" in ended.stdout
