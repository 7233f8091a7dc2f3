"""Runs of a notebook without a browser: cells run in order in this process, ``%%accelerate`` cells on workers."""

from __future__ import annotations

import base64
import os
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TextIO

from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from traitlets import Any as AnyTrait
from traitlets import Type
from traitlets.config import Config

from accel_nb.launch.target import read_bytes, read_notebook
from accel_nb.notebook.magics import unload_ipython_extension

StoreOutput = Callable[[dict[str, Any]], Any]
"""Stores one output of the running cell, in the notebook format, and returns it as stored."""

_MAY_RAISE = "raises-exception"


def run_notebook(path: str, *, out: str | None = None) -> int:
    """Run a notebook's cells until the last, or one that raises or is interrupted; return the exit code.

    Output of cells is printed as text; a copy of the notebook at ``out`` has it in all MIME types.
    """
    import nbformat

    notebook = read_notebook(read_bytes(path), path)
    shell = _make_shell()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for cell in cells:
        cell.outputs, cell.execution_count = [], None
    failed = None
    try:
        with _storing_streams(shell):
            for number, cell in enumerate(cells, 1):
                if not cell.source.strip():
                    continue
                cell.execution_count = shell.execution_count
                error = _run_cell(shell, cell)
                may_raise = _MAY_RAISE in cell.metadata.get("tags", ()) and not isinstance(error, KeyboardInterrupt)
                if error is not None and not may_raise:
                    failed = number
                    break
    finally:
        try:
            if out is not None:
                nbformat.write(notebook, out)
        finally:
            unload_ipython_extension(shell)
    if failed is not None:
        print(
            f"{os.path.basename(path)}: code cell {failed} of {len(cells)} raised; the ones after it did not run",
            file=sys.stderr,
        )
        return 1
    return 0


class _Publisher(DisplayPublisher):
    """Prints displays as text and stores them in all MIME types; an update replaces the stored display."""

    put: Any = AnyTrait()
    outputs_by_id: Any = AnyTrait()

    def publish(
        self,
        data: Any,
        metadata: Any = None,
        source: Any = None,
        *,
        transient: Any = None,
        update: bool = False,
        **_: Any,
    ) -> None:
        """Show one display."""
        displayed = self.outputs_by_id.get((transient or {}).get("display_id"))
        output = {"output_type": "display_data", "data": _json_ready(data), "metadata": metadata or {}}
        if update and displayed is not None:
            displayed.update(output)
        else:
            stored = self.put(output)
            if transient and transient.get("display_id"):
                self.outputs_by_id[transient["display_id"]] = stored
        if text := data.get("text/plain"):
            _show(text)

    def clear_output(self, wait: bool = False) -> None:
        """Do nothing: printed output cannot be cleared."""


class _DisplayHook(DisplayHook):
    """Shows the value of a cell's last expression."""

    put: Any = AnyTrait()

    def __call__(self, result: Any = None) -> None:
        """Show the value, unless it is None or the cell ends in a semicolon."""
        if result is None or self.quiet():
            return
        data, metadata = self.compute_format_data(result)
        self.put(
            {
                "output_type": "execute_result",
                "data": _json_ready(data),
                "metadata": metadata,
                "execution_count": self.prompt_count,
            }
        )
        _show(data.get("text/plain", ""))
        self.update_user_ns(result)
        self.fill_exec_result(result)


class _Shell(InteractiveShell):
    display_pub_class = Type(_Publisher)
    displayhook_class = Type(_DisplayHook)
    put: Any = AnyTrait()

    def _showtraceback(self, etype: Any, evalue: Any, stb: Any) -> None:
        lines = stb if isinstance(stb, list) else str(stb).splitlines()
        self.put({"output_type": "error", "ename": etype.__name__, "evalue": str(evalue), "traceback": lines})
        print("\n".join(lines), file=sys.__stderr__)

    def enable_gui(self, gui: Any = None) -> None:
        """Do nothing: there is no event loop, and pictures are inline."""


class _Tee:
    """A stream that forwards text, and stores it as output of the cell that runs.

    One for all cells: an object that refers to it, such as a logging handler, writes to it in later cells.
    """

    def __init__(self, stream: TextIO, name: str, shell: _Shell) -> None:
        self._stream = stream
        self._name = name
        self._shell = shell

    def write(self, text: str) -> int:
        if text:
            self._shell.put({"output_type": "stream", "name": self._name, "text": text})
        return self._stream.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _show(text: str) -> None:
    """Print text in the terminal, not through the streams that store it."""
    sys.stdout.flush()
    print(text, file=sys.__stdout__, flush=True)


def _make_shell() -> _Shell:
    main = types.ModuleType("__main__", "The namespace of the notebook's cells.")
    sys.modules["__main__"] = main
    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.colors = "neutral"
    shell = _Shell.instance(config=config, user_module=main, user_ns=main.__dict__)
    display_pub: Any = shell.display_pub
    display_pub.outputs_by_id = {}  # of all cells: one may update the display of an earlier one
    return shell


@contextmanager
def _storing_streams(shell: _Shell) -> Iterator[None]:
    """Store what is printed inside of the block."""
    with ExitStack() as stack:
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            stack.callback(setattr, sys, name, stream)
            setattr(sys, name, _Tee(stream, name, shell))
        yield


def _run_cell(shell: _Shell, cell: Any) -> BaseException | None:
    """Run a cell and store its outputs in it; return the error that has ended it."""
    import nbformat

    def put(output: dict[str, Any]) -> Any:
        last = cell.outputs[-1] if cell.outputs else None
        if output["output_type"] == "stream" and last is not None and last.get("name") == output["name"]:
            last["text"] += output["text"]
        else:
            cell.outputs.append(nbformat.from_dict(output))
        return cell.outputs[-1]

    display_pub: Any = shell.display_pub
    hook: Any = shell.displayhook
    shell.put = hook.put = display_pub.put = put
    result = shell.run_cell(cell.source, store_history=True)
    sys.stdout.flush()
    return result.error_before_exec or result.error_in_exec


def _json_ready(data: Any) -> dict[str, Any]:
    """Return display data as a notebook stores it: bytes (pictures) in base64."""
    return {
        kind: base64.b64encode(value).decode("ascii") if isinstance(value, bytes) else value
        for kind, value in data.items()
    }
