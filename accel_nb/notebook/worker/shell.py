"""The IPython shell of a worker: runs a cell as the notebook does, and sends its displays to the kernel."""

from __future__ import annotations

import builtins
import getpass
import io
import linecache
import os
import sys
import tokenize
import traceback
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import IPython
from IPython.core.compilerop import CachingCompiler
from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from traitlets import Any as AnyTrait
from traitlets import Type
from traitlets.config import Config

import accel_nb
from accel_nb.errors import GROUPS
from accel_nb.notebook.session.process_settings import EXIT_WARNING
from accel_nb.notebook.worker import widget_comms

PACKAGE_FOLDER = os.path.dirname(accel_nb.__file__) + os.sep
"""The folder of this package."""
IPYTHON_FOLDER = os.path.dirname(IPython.__file__) + os.sep

_NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)

_MAX_FRAMES = 40
"""How many frames of one traceback are shown."""
_NUM_FIRST_FRAMES = 15
_MAX_CAUSES = 4
"""How many errors of a chain are shown, the outermost included."""

SendDisplay = Callable[[str, dict[str, Any]], None]
"""Sends a topic (``display``, ``result``, ``clear`` or one of a comm) and a JSON-ready body to the kernel."""


class WorkerDisplayPublisher(DisplayPublisher):
    """Sends rich displays to the kernel."""

    show: Any = AnyTrait()

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
        """Send one display, or an update of one."""
        body = {"data": data, "metadata": metadata or {}, "transient": transient or {}, "update": update}
        self.show("display", _json_ready(body))

    def send_comm(self, topic: str, body: dict[str, Any]) -> None:
        """Send a message of a comm."""
        self.show(topic, _json_ready(body))

    def clear_output(self, wait: bool = False) -> None:
        """Request the kernel to clear the cell's output."""
        self.show("clear", {"wait": wait})


class WorkerDisplayHook(DisplayHook):
    """Sends the value of the last expression to the kernel."""

    show: Any = AnyTrait()

    def __call__(self, result: Any = None) -> None:
        """Send the value, unless it is None or the cell ends in a semicolon."""
        if result is None or self.quiet():
            return
        data, metadata = self.compute_format_data(result)
        if data:  # else the value has displayed itself
            self.show("result", _json_ready({"data": data, "metadata": metadata}))
        self.fill_exec_result(result)

    def quiet(self) -> bool:
        """Return whether the cell ends in a semicolon."""
        return ends_in_semicolon(self.shell.cell_text)  # type: ignore[attr-defined]


class WorkerCompiler(CachingCompiler):
    """A compiler that shows the code of cells under the notebook's names, such as ``In[3]``."""

    def __init__(self) -> None:
        super().__init__()
        self.cell_names: dict[str, str] = {}

    def format_code_name(self, name: str) -> tuple[str, str] | None:
        """Return label and name of a file's code, as in the notebook's tracebacks."""
        cell_name = self.cell_names.get(name)
        if cell_name:
            return "Cell", cell_name
        format_name = getattr(super(), "format_code_name", None)  # since IPython 8
        return None if format_name is None else format_name(name)


class WorkerShell(InteractiveShell):
    """A shell that runs cells in a worker; it stores the traceback of an error instead of printing it."""

    compiler_class = Type(WorkerCompiler)
    display_pub_class = Type(WorkerDisplayPublisher)
    displayhook_class = Type(WorkerDisplayHook)
    cell_text = ""
    _is_formatting = False
    _num_running_cells = 0
    structured_traceback: list[str] = []

    @contextmanager
    def as_notebook(self, class_name: str) -> Iterator[None]:
        """Show a notebook to modules that are imported in the block, as to those that a cell imports.

        They look for the builtin ``get_ipython``, and for the class name of the shell and its attribute ``kernel``,
        which stay those of the notebook.
        """
        if class_name:
            type(self).__name__ = class_name
            if class_name != "TerminalInteractiveShell":
                self.kernel = widget_comms.KernelOfCell()
        with self.builtin_trap:
            yield

    def _update_code_co_name(self, code: Any) -> Any:
        """Leave a cell's code under the name ``<module>``, by which it is found; IPython 7 gives it another one."""
        return code

    def run_cell(self, *args: Any, **options: Any) -> Any:
        """Run a cell, or the text that a running one passes to its shell, as ``%%capture`` does."""
        self._num_running_cells += 1
        try:
            return super().run_cell(*args, **options)
        finally:
            self._num_running_cells -= 1

    def _showtraceback(self, etype: Any, evalue: Any, stb: Any) -> None:
        self.structured_traceback = list(stb) if not isinstance(stb, str) else stb.splitlines()

    def showtraceback(self, exc_tuple: Any = None, *args: Any, **options: Any) -> None:
        """Store the traceback for the kernel, without frames of this package; none for an interrupt.

        The traceback of an error that did not end the cell, as one in a script of ``%run`` or in the text that a cell
        passes to its shell, is printed too. As in a notebook, ``%%capture`` does not capture it.
        """
        kind, error, trace = exc_tuple or sys.exc_info()
        if kind is None or error is None or issubclass(kind, KeyboardInterrupt | SystemExit):
            self.structured_traceback = []
            return
        is_internal_error = trace is not None and _innermost_file(trace).startswith(PACKAGE_FOLDER)
        shown = trace if is_internal_error else drop_frames(trace, PACKAGE_FOLDER)
        with shortened_tracebacks(error, shown) as (shown, num_left_out):
            self._is_formatting = True
            try:
                if _has_group(error):  # IPython prints these
                    own = drop_frames(shown, IPYTHON_FOLDER)
                    self.structured_traceback = "".join(traceback.format_exception(kind, error, own)).splitlines()
                else:
                    super().showtraceback((kind, error, shown), *args, **options)
            finally:
                self._is_formatting = False
        insert_omission_note(self.structured_traceback, num_left_out)
        if self._num_running_cells > 1:
            print("\n".join(self.structured_traceback), file=sys.__stderr__)
        elif not options.get("running_compiled_code"):
            print("\n".join(self.structured_traceback), file=sys.stderr)

    def show_usage_error(self, exc: BaseException) -> None:
        """Store the message about a wrong use of a magic, which the notebook's shell shows."""
        self.structured_traceback = [f"UsageError: {exc}"]

    def get_exception_only(self, exc_tuple: Any = None) -> str:
        """Return the exception as text; raise an interrupt that arrived while a traceback was being formatted.

        IPython would print it into the cell's output, above the error that the kernel shows.
        """
        if self._is_formatting and isinstance(interrupt := sys.exc_info()[1], KeyboardInterrupt):
            raise interrupt
        return super().get_exception_only(exc_tuple)

    def register_sources(self, sources: dict[str, Sequence[str]]) -> None:
        """Register source and name of the notebook's cells by file name, so that tracebacks show them."""
        for name, (text, shown) in sources.items():
            linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
            self.compile.cell_names[name] = shown  # pyright: ignore[reportAttributeAccessIssue]

    def ask_exit(self) -> None:
        """Raise SystemExit for ``exit()``, which ends the cell and is reported."""
        raise SystemExit(0)

    def enable_gui(self, gui: Any = None) -> None:
        """Raise RuntimeError for a graphical event loop, since a worker has no screen."""
        if gui is not None:
            raise RuntimeError(f"a worker has no screen for a {gui!r} event loop; show figures inline")


def ends_in_semicolon(source: str) -> bool:
    """Return whether the last token of Python source is a semicolon, comments ignored.

    IPython before 8 has no such function that takes a text.
    """
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    kept = [token.string for token in tokens if token.type not in _NO_CODE]
    return kept[-1:] == [";"]


def drop_frames(trace: types.TracebackType | None, folders: str | tuple[str, ...]) -> types.TracebackType | None:
    """Return a traceback without the frames of code in ``folders``; None if there are no others."""
    kept: list[types.TracebackType] = []
    while trace is not None:
        if not trace.tb_frame.f_code.co_filename.startswith(folders):
            kept.append(trace)
        trace = trace.tb_next
    return _link_frames(kept)


@contextmanager
def shortened_tracebacks(
    error: BaseException, trace: types.TracebackType | None
) -> Iterator[tuple[types.TracebackType | None, int]]:
    """Yield a traceback with a limited number of frames, and how many were left out; shorten chained errors too.

    IPython searches all loaded modules for each frame: a recursion of a thousand frames takes a minute.
    """
    chain = _error_chain(error)
    before = [(each, each.__traceback__, each.__cause__, each.__suppress_context__) for each in chain]
    shown, num_left_out = _shorten(trace)
    for each in chain[1:]:
        each.__traceback__ = _shorten(drop_frames(each.__traceback__, PACKAGE_FOLDER) or each.__traceback__)[0]
    if chain[_MAX_CAUSES:]:
        last = chain[_MAX_CAUSES - 1]
        last.__cause__, last.__suppress_context__ = None, True
    try:
        yield shown, num_left_out
    finally:
        for each, own, cause, is_suppressed in before:
            each.__traceback__, each.__cause__, each.__suppress_context__ = own, cause, is_suppressed


def insert_omission_note(lines: list[str], count: int) -> None:
    """Insert a line with the number of omitted frames above the last line of a traceback, if there are any."""
    if count:
        lines.insert(max(0, len(lines) - 1), f"({count:,} frames between these are left out)")


def _error_chain(error: BaseException) -> list[BaseException]:
    """Return an error and its causes in the order of tracebacks, at most one more than `_MAX_CAUSES`."""
    found = [error]
    while len(found) <= _MAX_CAUSES:
        last = found[-1]
        follows = last.__cause__ or (None if last.__suppress_context__ else last.__context__)
        if follows is None or follows in found:
            break
        found.append(follows)
    return found


def _has_group(error: BaseException | None) -> bool:
    """Return whether an error or one that it followed is a group of errors, which Python has since 3.11."""
    return error is not None and (isinstance(error, GROUPS) or _has_group(error.__context__))


def _shorten(trace: types.TracebackType | None) -> tuple[types.TracebackType | None, int]:
    """Return a traceback, reduced to its first and last frames if it has many, and the number of omitted frames."""
    places: list[types.TracebackType] = []
    while trace is not None:
        places.append(trace)
        trace = trace.tb_next
    num_left_out = len(places) - _MAX_FRAMES if len(places) > _MAX_FRAMES else 0
    if num_left_out:
        places = [*places[:_NUM_FIRST_FRAMES], *places[_NUM_FIRST_FRAMES + num_left_out :]]
    return _link_frames(places), num_left_out


def _link_frames(places: Sequence[types.TracebackType]) -> types.TracebackType | None:
    shown = None
    for place in reversed(places):
        shown = types.TracebackType(shown, place.tb_frame, place.tb_lasti, place.tb_lineno)
    return shown


def _innermost_file(trace: types.TracebackType) -> str:
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame.f_code.co_filename


def get_worker_shell(show: SendDisplay) -> WorkerShell:
    """Return the shell of this worker, with a new ``__main__`` as its namespace."""
    if WorkerShell.initialized():  # created in the zygote, before this process was forked
        shell = WorkerShell.instance()
        shell.display_pub.show = show  # type: ignore[attr-defined]
        shell.displayhook.show = show  # type: ignore[attr-defined]
        return shell
    main = types.ModuleType("__main__", "The namespace of the notebook's cells in this worker.")
    sys.modules["__main__"] = main
    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.colors = "neutral"
    config.InteractiveShell.xmode = "Context"
    shell = WorkerShell.instance(config=config, user_module=main, user_ns=main.__dict__)
    shell.display_pub.show = show  # type: ignore[attr-defined]
    shell.displayhook.show = show  # type: ignore[attr-defined]
    # IPython binds ``open`` to the original function, so cells would not use a replacement of builtins.open.
    shell.user_ns.pop("open", None)
    # For ``%%script`` IPython calls the method that it finds now, for ``%%bash`` and others the one of that time, which
    # may be a replacement.
    script: Any = shell.find_cell_magic("script")
    shell.magics_manager.register_function(lambda line, cell: script.__self__.shebang(line, cell), "cell", "script")
    sys.__dict__.pop("ps1", None)  # libraries then assume an interactive session, and some refuse to train
    builtins.input = getpass.getpass = _no_input
    widget_comms.install()
    warnings.filterwarnings("ignore", message=EXIT_WARNING, module="IPython")
    return shell


def _no_input(prompt: object = "", stream: object = None, **_: object) -> str:
    raise RuntimeError(
        "input() does not work on a worker, and neither do getpass() and debuggers, since every rank would wait for an "
        "answer. Call it in a normal cell and use the result here by its name; debug with the cell's magic commented "
        "out."
    )


def _json_ready(value: Any) -> Any:
    """Return display data as JSON: bytes (pictures) in base64, values of other types as text."""
    import base64

    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, dict):
        return {str(key): _json_ready(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_ready(item) for item in value]
    return value if isinstance(value, str | int | float | bool | type(None)) else str(value)
