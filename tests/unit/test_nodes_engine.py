"""A node that is silent is lost after a time, which is longer while it receives large data."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from accel_nb.pool.nodes.engine import RECEIVED_BYTES_PER_S, NodesEngine
from accel_nb.pool.nodes.frames import Frame
from tests.conftest import wait_for

LOST_AFTER_S, RECEIVING_S = 0.2, 60.0


class SilentLink:
    """A link to a host that never answers."""

    name = "far"

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.times_asked = 0
        self._closed = threading.Event()

    def send(self, frames: Sequence[Frame]) -> None:
        pass

    def beat(self) -> None:
        pass

    def unreceived_bytes(self) -> int:
        self.times_asked += 1
        return self.num_bytes

    def receive(self) -> list[Frame] | None:
        self._closed.wait()
        return None

    def close(self) -> None:
        self._closed.set()

    def release(self) -> None:
        pass


def test_a_silent_node_is_not_lost_while_it_receives_large_data():
    link = SilentLink(int(RECEIVING_S * RECEIVED_BYTES_PER_S))
    started = time.monotonic()
    engine = NodesEngine([link], lost_after_s=LOST_AFTER_S)
    try:
        assert wait_for(lambda: time.monotonic() - started > 3 * LOST_AFTER_S and link.times_asked > 3)
        assert engine.facts().lost_nodes == {}
        link.num_bytes = 0
        assert wait_for(lambda: 0 in engine.facts().lost_nodes)
        assert "far was lost: it has not answered for" in engine.facts().lost_nodes[0]
    finally:
        link.close()
        engine.stop()
