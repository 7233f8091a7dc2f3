"""Comms of a worker's widgets: their messages go to the kernel, which sends them to the front end."""

from __future__ import annotations

import base64
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

from IPython.core.getipython import get_ipython

from accel_nb.pool.sync.reductions.widgets import comm_function


class _CommManager:
    """The registry of comms that the front end opens: always empty, since it opens comms in the kernel only."""

    def register_target(self, name: str, callback: object) -> None:
        """Do nothing: no comm of this name will arrive."""


class KernelOfCell:
    """The attributes of an ipykernel kernel by which libraries detect that they run in a notebook."""

    comm_manager = _CommManager()

    def get_parent(self) -> dict[str, Any]:
        """Return a parent message with a placeholder id; the kernel replaces it by the id of its own parent message."""
        return {"header": {"msg_id": "cell"}}


class WorkerComm:
    """A comm with the interface of ipykernel's, which sends its messages to the kernel and receives none."""

    kernel = KernelOfCell()

    def __init__(
        self,
        target_name: str = "comm",
        data: Any = None,
        metadata: Any = None,
        buffers: Sequence[Any] | None = None,
        comm_id: str | None = None,
        primary: bool = True,
        **_: Any,
    ) -> None:
        """Open the comm in the front end if ``primary`` is set."""
        self.comm_id = comm_id or uuid.uuid4().hex
        self.target_name = target_name
        self._is_closed = False
        self._is_paused = False
        if primary:
            self._publish("comm_open", data, metadata, buffers, target_name=target_name)

    def send(self, data: Any = None, metadata: Any = None, buffers: Sequence[Any] | None = None) -> None:
        """Send a message to the front end."""
        self._publish("comm_msg", data, metadata, buffers)

    def close(self, data: Any = None, metadata: Any = None, buffers: Sequence[Any] | None = None, **_: Any) -> None:
        """Close the comm in the front end; later calls have no effect."""
        if not self._is_closed:
            self._is_closed = True
            self._publish("comm_close", data, metadata, buffers)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Send nothing while the block runs."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def on_msg(self, callback: Callable[..., object] | None) -> None:
        """Do nothing: no messages arrive."""

    def on_close(self, callback: Callable[..., object] | None) -> None:
        """Do nothing: no messages arrive."""

    def _publish(self, topic: str, data: Any, metadata: Any, buffers: Sequence[Any] | None, **keys: Any) -> None:
        if self._is_paused:
            return
        shell: Any = get_ipython()
        encoded = [base64.b64encode(buffer).decode("ascii") for buffer in buffers or ()]
        body = {"comm_id": self.comm_id, "data": data or {}, "metadata": metadata or {}, "buffers": encoded, **keys}
        shell.display_pub.send_comm(topic, body)


def install() -> None:
    """Make widgets of this process use `WorkerComm`, once ipywidgets is imported."""
    if not any(isinstance(finder, _BeforeWidgets) for finder in sys.meta_path):
        sys.meta_path.insert(0, _BeforeWidgets())


class _BeforeWidgets(MetaPathFinder):
    """Import hook that installs `WorkerComm` when ipywidgets is about to be imported; finds no module itself."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        """Install `WorkerComm` if the module is ipywidgets; return None, so that other finders import it."""
        if fullname == "ipywidgets":
            sys.meta_path.remove(self)
            setattr(*comm_function(), WorkerComm)
