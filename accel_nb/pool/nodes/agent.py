"""A host whose frames travel over standard input and output: ``python -m accel_nb.pool.nodes.agent``.

The first frame has the settings of the host. The process ends when its standard input is closed. With ``--versions``
it prints the versions of its packages as JSON, and ends.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from queue import SimpleQueue

from accel_nb.pool.nodes.frames import BEAT, HEARTBEAT_S, Frame, FrameStream, join
from accel_nb.pool.nodes.host import HostSettings, NodeHost, own_versions, read_settings

AGENT = "accel_nb.pool.nodes.agent"
READ_BYTES = 1024 * 1024
SMALL_BYTES = 64 * 1024
"""Frames of fewer bytes are written by one call."""


class AgentLink:
    """The kernel's side: starts an agent by a command that runs Python, and owns its pipes."""

    def __init__(self, name: str, command: Sequence[str], settings: HostSettings) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [*command, "-m", AGENT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._stream = FrameStream()
        self._outgoing: SimpleQueue[bytes | None] = SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="accel_nb agent", daemon=True)
        self._writer.start()
        self.send([Frame({"kind": "settings", "settings": asdict(settings)})])

    @property
    def pid(self) -> int:
        """The process id of the command."""
        return self._process.pid

    def wait_for_start(self, timeout_s: float) -> bool:
        """Wait until the agent has sent its first frame, or has ended; return False if neither happens in time."""
        assert self._process.stdout is not None
        return bool(select.select([self._process.stdout], [], [], timeout_s)[0])

    def send(self, frames: Sequence[Frame]) -> None:
        """Queue copies of frames, which a thread writes: the pipe to a node that has stopped reading becomes full."""
        self._outgoing.put(join(frames))

    def beat(self) -> None:
        """Queue a heartbeat, unless other frames are being written, which show as well that this process runs."""
        if self._outgoing.empty():
            self.send([BEAT])

    def unreceived_bytes(self) -> int:
        """Return 0: data to the agent does not delay its heartbeats, which another thread writes to another pipe."""
        return 0

    def receive(self) -> list[Frame] | None:
        """Wait for data and return the frames that are whole now; None when the agent has ended."""
        assert self._process.stdout is not None
        if data := os.read(self._process.stdout.fileno(), READ_BYTES):
            return self._stream.feed(data)
        return None

    def close(self) -> None:
        """Kill the process if it still runs."""
        self._process.kill()
        self._process.wait()
        self._outgoing.put(None)
        self._writer.join()
        assert self._process.stdin is not None
        with suppress(OSError):  # data left in its buffer has no reader
            self._process.stdin.close()

    def release(self) -> None:
        """Close the pipe that `receive` has read."""
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _write(self) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):
            while (data := self._outgoing.get()) is not None:
                self._process.stdin.write(data)
                self._process.stdin.flush()


def serve(incoming: int, outgoing: int) -> None:
    """Run a host between two descriptors until the first is closed."""
    stream, host = FrameStream(), None
    while data := os.read(incoming, READ_BYTES):
        frames = stream.feed(data)
        if frames and host is None:
            host = NodeHost(read_settings(frames.pop(0).message["settings"]))
            os.write(outgoing, join([BEAT]))  # reports that the host runs
            threading.Thread(target=_forward, args=(host, outgoing), daemon=True).start()
        if host is not None:
            host.receive(frames)
    if host is not None:
        host.stop()


def _forward(host: NodeHost, outgoing: int) -> None:
    """Write the frames of a host, and heartbeats between them; end the process with the host."""
    while (frames := host.take(HEARTBEAT_S)) is not None:
        frames = frames or [BEAT]
        is_small = sum(frame.num_bytes for frame in frames) < SMALL_BYTES
        for piece in [join(frames)] if is_small else [piece for frame in frames for piece in frame.to_stream()]:
            view = memoryview(piece)
            while view:
                view = view[os.write(outgoing, view) :]
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1:] == ["--versions"]:
        print(json.dumps(own_versions()))
        sys.exit()
    own_output = os.dup(1)
    os.dup2(2, 1)  # text that libraries print must not be among the frames
    serve(0, own_output)
