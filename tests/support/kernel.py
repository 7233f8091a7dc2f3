"""A real IPython kernel, driven as a front end drives it."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty
from tempfile import TemporaryDirectory
from typing import Any

from jupyter_client.manager import KernelManager

_ANSI = re.compile(r"\x1b\[[0-9;]*m")


@dataclass
class Output:
    """The output of one cell."""

    stdout: str = ""
    stderr: str = ""
    displays: list[dict[str, Any]] = field(default_factory=list)
    result: str = ""
    """The text of the value of the cell's last expression, which is one of the displays too."""
    updates: list[str] = field(default_factory=list)
    error: tuple[str, str] | None = None
    traceback: str = ""

    @property
    def receipt(self) -> str:
        """The first display's text."""
        return self.displays[0]["text/plain"] if self.displays else ""

    @property
    def texts(self) -> list[str]:
        """The text of every display."""
        return [data.get("text/plain", "") for data in self.displays]


class Kernel:
    """One kernel and its client."""

    def __init__(self, manager: KernelManager, client: Any) -> None:
        self.manager = manager
        self.client = client

    @property
    def pid(self) -> int:
        return self.manager.provisioner.process.pid  # type: ignore[union-attr]

    def run(
        self,
        code: str,
        *,
        timeout_s: float = 60,
        interrupt_on: str | None = None,
        act: Callable[[], None] | None = None,
    ) -> Output:
        """Run a cell and wait for its end; interrupt it, or call ``act``, once it has printed ``interrupt_on``."""
        act = act or self.manager.interrupt_kernel
        output = Output()
        # Older kernels drop requests that arrive within 0.1 s after an error, unless they are told not to.
        message_id = self.client.execute(code, stop_on_error=False)
        places: dict[str, int] = {}
        while True:
            try:
                message = self.client.get_iopub_msg(timeout=timeout_s)
            except Empty:
                raise TimeoutError(f"the cell has sent nothing for {timeout_s:g} s, after {output}") from None
            if message["parent_header"].get("msg_id") != message_id:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "status" and content["execution_state"] == "idle":
                break
            if kind == "stream":
                setattr(output, content["name"], getattr(output, content["name"]) + content["text"])
                if interrupt_on is not None and interrupt_on in output.stdout:
                    interrupt_on = None
                    act()
            elif kind in ("display_data", "execute_result"):
                if display_id := content.get("transient", {}).get("display_id"):
                    places[display_id] = len(output.displays)
                output.displays.append(content["data"])
                if kind == "execute_result":
                    output.result = content["data"].get("text/plain", "")
            elif kind == "update_display_data":
                output.updates.append(content["data"].get("text/plain", ""))
                place = places.get(content["transient"]["display_id"])
                if place is not None:  # else it is the display of an earlier cell
                    output.displays[place] = content["data"]
            elif kind == "error":
                output.error = content["ename"], content["evalue"]
                output.traceback = _ANSI.sub("", "\n".join(content["traceback"]))
        self.client.get_shell_msg(timeout=timeout_s)
        return output

    def value(self, expression: str) -> Any:
        """Return the value of an expression whose repr is a literal."""
        import ast

        output = self.run(f"print(repr({expression}))")
        assert output.error is None, output.traceback
        return ast.literal_eval(output.stdout)


@contextmanager
def own_kernel(manager: KernelManager) -> Iterator[None]:
    """Prepare a manager: its kernel runs this interpreter, and is reached by Unix sockets.

    Jupyter finds free TCP ports before the kernel starts. Another test may bind one of them before the kernel does.
    """
    with TemporaryDirectory(prefix="kernel-") as folder:
        manager.kernel_spec.argv[0] = sys.executable  # type: ignore[union-attr]
        manager.transport, manager.ip = "ipc", str(Path(folder) / "channel")
        yield


@contextmanager
def running_kernel() -> Iterator[Kernel]:
    before, started = set(threading.enumerate()), set[threading.Thread]()
    manager = KernelManager(kernel_name="python3")
    with own_kernel(manager):
        manager.start_kernel()
        client = manager.client()
        client.start_channels()
        try:
            client.wait_for_ready(timeout=60)
            started = set(threading.enumerate()) - before
            yield Kernel(manager, client)
        finally:
            client.stop_channels()
            manager.shutdown_kernel(now=False)
            client.context.term() if client.context is not manager.context else None
            for thread in started:
                thread.join(5)
