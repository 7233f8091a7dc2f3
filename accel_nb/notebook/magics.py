"""``%%accelerate`` and ``%accelerate``: from a line of text to a run or an answer."""

from __future__ import annotations

import ast
import shlex
import threading
from collections.abc import Callable
from typing import Any

from IPython.core.magic import Magics, line_cell_magic, magics_class, no_var_expand

from accel_nb.config import Layer, Resolved, environment_layer, parse_flags, resolve, usage
from accel_nb.errors import AccelNbError, CellSyntaxError, ConfigError
from accel_nb.forecast.request import read_request
from accel_nb.forecast.table import show
from accel_nb.notebook.doctor import diagnose
from accel_nb.notebook.forecasting import forecast_notebook
from accel_nb.notebook.plan import describe_plan
from accel_nb.notebook.raising import with_traceback
from accel_nb.notebook.session import Cell, Session
from accel_nb.notebook.sidebar import NotebookSettings, answers_of, describe_state
from accel_nb.pool.place import place_workers
from accel_nb.runtime.environment import option_variables
from accel_nb.ui import SidebarComm

SETTINGS_S = 1.0
"""How long the first cell waits for the notebook's settings where a browser was called that may have them."""


@magics_class
class AccelerateMagics(Magics):
    """The magics of one kernel and the session behind them."""

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self._shell: Any = shell
        self.session = Session(shell.user_ns, hidden_names=frozenset(shell.user_ns_hidden))
        self.settings = NotebookSettings(self.session)
        self.sidebar: SidebarComm | None = None
        self._last: tuple[object, Resolved] | None = None
        self._commands: dict[str, Callable[[list[str]], str | None]] = {
            "status": self._status,
            "doctor": self._doctor,
            "plan": self._plan,
            "config": self._config,
            "start": self._start,
            "stop": self._stop,
            "restart": self._restart,
            "logs": self._logs,
            "pull": self._pull,
            "push": self._push,
        }

    @no_var_expand
    @line_cell_magic
    def accelerate(self, line: str, cell: str | None = None) -> None:
        """Run a cell on all devices (``%%accelerate``), or ask about the workers (``%accelerate``)."""
        try:
            if cell is None:
                self._command(line)
            elif line.split() in (["--help"], ["-h"]):
                print(usage())
            else:
                self._run(line, cell)
        except AccelNbError as error:
            if not hasattr(error, "_render_traceback_"):
                with_traceback(error, [f"{type(error).__name__}: {error}"])
            raise

    def _run(self, line: str, text: str) -> None:
        if self.sidebar is not None and self.sidebar.is_called and _is_of_jupyterlab(self._shell):
            self.settings.wait(SETTINGS_S)
        resolved = self._resolve(line, "%%accelerate")
        config = resolved.config
        cell = self._parse(line, text)
        specs = place_workers(gpus=config.gpus, cpus=config.cpus)
        resolved.check_world(len(specs))
        if config.dry_run:
            print(describe_plan(resolved, specs))
            return
        mode = "off" if not config.panel else "static" if config.static else "live"
        self.session.run(cell, resolved, specs, mode=mode)

    def _parse(self, line: str, text: str) -> Cell:
        """Turn the cell's text into Python, with the magic's own line as a comment: line numbers are the notebook's."""
        source = f"# %%accelerate {line}\n" + self._shell.transform_cell(text)
        name = f"<accelerate cell {self._shell.execution_count}>"
        try:
            tree = ast.parse(source, filename=name)
        except SyntaxError as error:
            lines = self._shell.SyntaxTB.structured_traceback(SyntaxError, error, [])
            raise with_traceback(CellSyntaxError(str(error)), lines) from None
        return Cell(source, tree, self._shell.execution_count)

    def _resolve(self, line: str, source: str) -> Resolved:
        """Return the options of a line; the last answer is kept, since cells are mostly run with the same line."""
        variables = option_variables()
        key = (line, source, tuple(variables.items()), self.session.notebook_layers)
        if self._last is None or self._last[0] != key or self._last[1].config.config is not None:
            self._last = key, resolve(self._layers(parse_flags(line, source)))
        return self._last[1]

    def _layers(self, flags: Layer) -> list[Layer]:
        return [environment_layer(option_variables()), *self.session.notebook_layers, flags]

    def _command(self, line: str) -> None:
        try:
            words = shlex.split(line)
        except ValueError as error:
            raise ConfigError(f"%accelerate {line}: {error}; balance the quotes") from None
        name = words[0] if words else "status"
        command = self._commands.get(name)
        if command is None:
            from difflib import get_close_matches

            near = get_close_matches(name, self._commands, 1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ConfigError(f"%accelerate has no command {name!r}{hint}. It has: {', '.join(self._commands)}.")
        text = command(words[1:])
        if text:
            print(text)

    def _status(self, words: list[str]) -> str:
        self.session.look()
        status = self.session.status()
        lines = [f"pool: {status.state}"]
        if status.zygote_pid is not None:
            lines.append(f"workers are forked from process {status.zygote_pid}")
        lines += [
            f"rank {rank}: {spec.device}, threads: {spec.num_threads}, process {status.pids.get(rank, '?')}"
            for rank, spec in enumerate(status.specs)
        ]
        if status.last_cell_s is not None:
            lines.append(f"last cell: {status.last_cell_s:.3g} s")
        lines += [f"only on the workers: {name} ({reason})" for name, reason in status.kept.items()]
        return "\n".join(lines)

    def _doctor(self, words: list[str]) -> str:
        return "\n".join(str(finding) for finding in diagnose())

    def _plan(self, words: list[str]) -> str:
        request = read_request(words, "%accelerate plan", in_notebook=True)
        resolved = resolve(self._layers(request.flags))
        config, lines = resolved.config, []
        devices = request.other_devices(config)
        if devices is None:
            specs = place_workers(gpus=config.gpus, cpus=config.cpus)
            devices = [spec.device for spec in specs]
            lines.append(describe_plan(resolved, specs))
        found = forecast_notebook(request, self._shell.user_ns, config, devices)
        if request.form != "text":
            lines = []
        return "\n\n".join([*lines, *([] if found is None else [show(found, request.form)])])

    def _config(self, words: list[str]) -> str:
        return self._resolve(shlex.join(words), "%accelerate config").table()

    def _start(self, words: list[str]) -> str:
        config = self._resolve(shlex.join(words), "%accelerate start").config
        specs = place_workers(gpus=config.gpus, cpus=config.cpus)
        self.session.start(specs)
        return f"{len(specs)} worker{'s are' if len(specs) != 1 else ' is'} ready"

    def _stop(self, words: list[str]) -> str:
        self.session.stop()
        return "workers ended"

    def _restart(self, words: list[str]) -> str:
        self.session.stop()
        self.session.warm_up()
        return "workers ended; the next cell starts fresh ones with the notebook's values"

    def _logs(self, words: list[str]) -> str:
        logs = self.session.logs
        if not logs:
            return "no cell has run on workers yet"
        if not words:
            words = [str(rank) for rank in logs]
        wrong = [word for word in words if not word.isdecimal() or int(word) not in logs]
        if wrong:
            raise ConfigError(f"no rank {', '.join(wrong)}; the last cell ran on ranks {', '.join(map(str, logs))}")
        return "\n".join(f"--- rank {word}\n{logs[int(word)].text()}" for word in words)

    def _pull(self, words: list[str]) -> str:
        names = _names(words, "pull")
        self.session.pull(names)
        return f"pulled {', '.join(names)}"

    def _push(self, words: list[str]) -> str:
        names = _names(words, "push")
        self.session.push(names)
        return f"{', '.join(names)} will be sent with the next cell that uses them"


def _names(words: list[str], command: str) -> list[str]:
    names = [name for word in words for name in word.split(",") if name]
    if not names or not all(name.isidentifier() for name in names):
        raise ConfigError(
            f"%accelerate {command} takes names of variables, as in `%accelerate {command} model history`"
        )
    return names


def _is_of_jupyterlab(shell: Any) -> bool:
    """Whether the running cell came from a front end that answers while a cell runs, and says so in its request."""
    kernel = getattr(shell, "kernel", None)
    if kernel is None or not getattr(kernel, "_supports_kernel_subshells", False):
        return False
    return "cellId" in shell.get_parent().get("metadata", {})


def session_of(shell: Any) -> Session:
    """Return the session of a shell, loading the extension if it is not loaded yet."""
    magics = shell.magics_manager.registry.get(AccelerateMagics.__name__) or load(shell)
    return magics.session


def load(shell: Any) -> AccelerateMagics:
    """Register the magics with a shell and start warming up; returns them."""
    unload(shell)
    magics = AccelerateMagics(shell)
    shell.register_magics(magics)
    magics.session.warm_up()
    # The first parsing of flags imports most of what it needs: let it happen while the user writes the first cell.
    threading.Thread(target=parse_flags, args=("", "%load_ext"), name="accel_nb flags", daemon=True).start()
    answers = answers_of(magics.session, magics.settings)
    magics.sidebar = SidebarComm(shell, lambda: describe_state(magics.session), answers)
    magics.session.on_change = magics.sidebar.push
    return magics


def unload(shell: Any) -> None:
    """End the workers and take the magics away again. Harmless when they were never loaded."""
    magics = shell.magics_manager.registry.pop(AccelerateMagics.__name__, None)
    if magics is not None:
        magics.session.stop()
        if magics.sidebar is not None:
            magics.sidebar.close()
    for kind in ("line", "cell"):
        shell.magics_manager.magics[kind].pop("accelerate", None)
