"""The magics ``%%accelerate`` and ``%accelerate``: parse a line, run a cell or a command.

Modules of a single command are imported by that command, so that ``%load_ext`` takes less time.
"""

from __future__ import annotations

import ast
import re
import shlex
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

from IPython.core.magic import Magics, line_cell_magic, magics_class, no_var_expand

from accel_nb.config import (
    Layer,
    Resolved,
    current_layers,
    environment_layer,
    parse_flags,
    resolve,
    usage,
    without_overridden,
)
from accel_nb.config.engine_section import ENGINES
from accel_nb.config.message_text import ranks_text
from accel_nb.errors import GROUPS, AccelNbError, CellSyntaxError, ConfigError, PoolError, error_text
from accel_nb.notebook.cells.outputs import KEPT_NAMES
from accel_nb.notebook.cells.own_magics import replace_magics
from accel_nb.notebook.cells.run_magic import insert_scripts
from accel_nb.notebook.session.background import BackgroundRun
from accel_nb.notebook.session.engines import start_engine
from accel_nb.notebook.session.error_translation import with_traceback
from accel_nb.notebook.session.restarts import require_checkpoint, run_with_restarts
from accel_nb.notebook.session.run_controls import describe_outcome
from accel_nb.notebook.session.run_state import Cell
from accel_nb.notebook.session.session import Session
from accel_nb.notebook.sidebar import NotebookSettings, describe_state, poll_until_warm, request_handlers
from accel_nb.pool.device_assignment import uses_gpus
from accel_nb.runtime.process.environment import option_variables
from accel_nb.runtime.process.requirements import unmet_requirements
from accel_nb.runtime.process.secrets import redact
from accel_nb.telemetry.actions import (
    Action,
    Inspect,
    SaveNow,
    ScaleLearningRate,
    SetLearningRate,
    SetReportInterval,
    StopAfterStep,
)
from accel_nb.ui.comm import SidebarComm

STEP_TIMEOUT_S = 10.0
"""How long a magic waits for the end of a step, in seconds."""
SETTINGS_TIMEOUT_S = 1.0
"""How long the first cell waits for the notebook's settings from a browser, in seconds."""
_NO_BACKGROUND = (
    "no cell runs in the background; `%%accelerate --background` starts one. A cell in the foreground is controlled "
    "from its panel"
)
_HELP = ["--help"], ["-h"], ["help"]
_WITHOUT_ARGUMENTS = ("status", "wait", "interrupt", "checkpoint", "doctor", "nodes", "restart")
_CONNECT = (
    "%accelerate connect takes machines that ssh reaches (HOST,HOST), the address of a Ray cluster (HOST:PORT), slurm, "
    "kubernetes, ray or local, and options such as --nodes 2"
)
_VARIABLE = re.compile(r"\$(\w+)|\{(\w+)\}")
_SETTINGS = "give lr=RATE, lr*=FACTOR or log-every=STEPS"


@magics_class
class AccelerateMagics(Magics):
    """The magics of one kernel, and their session."""

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self._shell: Any = shell
        self.session = Session(shell.user_ns, start_engine, hidden_names=frozenset(shell.user_ns_hidden) - KEPT_NAMES)
        self.settings = NotebookSettings(self.session)
        self.sidebar: SidebarComm | None = None
        self._last_resolved: tuple[object, Resolved] | None = None
        self._commands: dict[str, Callable[[list[str]], str | None]] = {
            "status": self._status,
            "wait": self._wait,
            "attach": self._attach,
            "interrupt": self._interrupt,
            "checkpoint": self._checkpoint,
            "set": self._set,
            "inspect": self._inspect,
            "doctor": self._doctor,
            "plan": self._plan,
            "config": self._config,
            "export": self._export,
            "start": self._start,
            "stop": self._stop,
            "restart": self._restart,
            "connect": self._connect,
            "nodes": self._nodes,
            "logs": self._logs,
            "pull": self._pull,
            "push": self._push,
        }

    @no_var_expand
    @line_cell_magic
    def accelerate(self, line: str, cell: str | None = None) -> BackgroundRun | None:
        """Run a cell on all devices (``%%accelerate``), or a command (``%accelerate``).

        Return a handle for a cell that runs in the background.
        """
        try:
            if cell is None:
                self._command(line)
            elif line.split() in _HELP:
                print(usage())
            else:
                return self._run(line, cell)
        except AccelNbError as error:
            if "_render_traceback_" not in vars(error):  # an error of a worker already has its traceback
                with_traceback(error, [redact(f"{type(error).__name__}: {error}")])
            raise
        except (SyntaxError, *GROUPS) as error:  # IPython ignores _render_traceback_ of these
            if (render := getattr(error, "_render_traceback_", None)) is None:
                raise
            text = error_text(error)
            is_group = isinstance(error, GROUPS)
            shown = PoolError(f"{type(error).__name__}: {text}") if is_group else CellSyntaxError(text)
            with_traceback(shown, render())
        else:
            return None
        raise shown  # outside of the handler: IPython searches the error's context for groups too

    def apply_background_results(self, info: object) -> None:
        """Apply the results of a background run before each cell."""
        try:
            self.session.collect_background()
        except Exception as error:  # assigning to the user's objects may raise anything; the next cell runs anyway
            text = error_text(error)
            print(f"the results of the run in the background could not be applied: {text}", file=sys.stderr)

    def release_unused(self, result: object) -> None:
        """Free values that a cell has deleted or replaced, as it ends."""
        with self.session.namespace_lock:
            self.session.namespace_session.release_unused()

    def _run(self, line: str, text: str) -> BackgroundRun | None:
        if self.sidebar is not None and self.sidebar.expects_browser and _is_from_jupyterlab(self._shell):
            self.settings.wait(SETTINGS_TIMEOUT_S)
        resolved = self._resolve(line, "%%accelerate")
        config = resolved.config
        cell = self._parse(line, text)
        specs = self.session.assign_workers(config)
        resolved.check_world(len(specs))
        require_checkpoint(resolved)
        if config.dry_run:
            from accel_nb.notebook.reports.plan import describe_plan

            print(redact(describe_plan(resolved, specs)))
            return None
        mode = "off" if not config.panel else "static" if config.static else "live"
        if config.background:
            return self.session.start_in_background(cell, resolved, specs, mode=mode)
        with self.session.reserving_devices(specs):
            run_with_restarts(self.session, cell, resolved, specs, mode=mode)
        return None

    def _parse(self, line: str, text: str) -> Cell:
        """Parse the cell; the magic's line becomes a comment, so that line numbers are the notebook's."""
        number = self._shell.displayhook.prompt_count  # IPython 9 increments execution_count before it runs a cell
        name = f"<accelerate cell {number}>"
        source, flags = "", 0
        try:
            with warnings.catch_warnings():  # the workers report the warnings of the compiler
                warnings.simplefilter("ignore")
                source, flags = insert_scripts(f"# %%accelerate {line}\n" + self._shell.transform_cell(text))
                source = replace_magics(source, self._shell, self._shell.user_ns)
                tree = ast.parse(source, filename=name)
                compile(tree, name, "exec", flags | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        except SyntaxError as error:
            number_of_line = error.lineno or 0
            if not source:  # IPython's tokenizer has not seen the magic's line
                error.lineno, error.filename = number_of_line + 1, name
            elif error.text is None:  # the compiler reads it from the file, if there is one
                error.text = "".join(source.splitlines()[number_of_line - 1 : number_of_line])
            lines = self._shell.SyntaxTB.structured_traceback(type(error), error, [])
            raise with_traceback(CellSyntaxError(str(error)), lines) from None
        return Cell(source, tree, number, flags=flags)

    def _resolve(self, line: str, source: str) -> Resolved:
        """Resolve the options of a line. The last result is cached, since cells mostly have the same line."""
        names = [dollar or braces for dollar, braces in _VARIABLE.findall(line)]
        if inserted := [name for name in names if name in self._shell.user_ns]:
            raise ConfigError(
                f"{source} {line}: variables of the notebook ({', '.join(inserted)}) are not inserted into the line; "
                "write the value, or set the option in os.environ, as in os.environ['ACCEL_NB_CPUS'] = '2'"
            )
        variables = option_variables()
        key = (line, source, tuple(variables.items()), self.session.notebook_layers, self.session.connected_layers)
        if (
            self._last_resolved is None
            or self._last_resolved[0] != key
            or self._last_resolved[1].config.config is not None
        ):
            self._last_resolved = key, resolve(self._layers(parse_flags(line, source)))
        return self._last_resolved[1]

    def _layers(self, flags: Layer) -> list[Layer]:
        launched = current_layers()  # the options of an `accel-nb launch` of this notebook
        given = without_overridden(flags, launched)
        own = [*self.session.notebook_layers, *self.session.connected_layers]
        return [environment_layer(option_variables()), *own, given, *launched]

    def _command(self, line: str) -> None:
        try:
            words = shlex.split(line)
        except ValueError as error:
            raise ConfigError(f"%accelerate {line}: {error}; close the quotes") from None
        if words in _HELP:
            print(f"%accelerate {'|'.join(self._commands)}\n\n{usage()}")
            return
        name = words[0] if words else "status"
        command = self._commands.get(name)
        if command is None:
            from difflib import get_close_matches

            near = get_close_matches(name, self._commands, 1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ConfigError(f"%accelerate has no command {name!r}{hint}. It has: {', '.join(self._commands)}.")
        if name in _WITHOUT_ARGUMENTS and words[1:]:
            raise ConfigError(f"%accelerate {name} takes no arguments, and was given {' '.join(words[1:])}")
        text = command(words[1:])
        if text:
            print(text if name == "logs" else redact(text))  # the cell's own output is shown unchanged

    def _status(self, words: list[str]) -> str:
        self.session.poll()
        status = self.session.status()
        lines = [f"pool: {status.state}"]
        if status.zygote_pid is not None:
            lines.append(f"workers are forked from process {status.zygote_pid}")
        for rank, spec in enumerate(status.specs):
            node = f" on {status.nodes[spec.node]}" if status.nodes else ""
            process = status.pids.get(rank, "?")
            lines.append(f"rank {rank}: {spec.device}{node}, threads: {spec.num_threads}, process {process}")
        lines += status.lost_nodes.values()
        if self.session.background is not None:
            lines.append(self.session.background.status())
        if status.last_cell_s is not None:
            lines.append(f"last cell: {status.last_cell_s:.3g} s")
        lines += [f"only on the workers: {name} ({reason})" for name, reason in status.only_on_workers.items()]
        return "\n".join(lines)

    def _doctor(self, words: list[str]) -> str:
        from accel_nb.notebook.reports.doctor import diagnose
        from accel_nb.notebook.reports.nodes import diagnose_nodes

        findings = [*diagnose(), *diagnose_nodes(self.session.engine_facts())]
        return "\n".join(map(str, findings))

    def _plan(self, words: list[str]) -> str:
        from accel_nb.forecast.request import read_request
        from accel_nb.forecast.table import render
        from accel_nb.notebook.reports.forecasting import forecast_notebook
        from accel_nb.notebook.reports.plan import describe_plan

        request = read_request(words, "%accelerate plan", in_notebook=True)
        resolved = resolve(self._layers(request.flags))
        config, lines = resolved.config, []
        devices = request.other_devices(config)
        if devices is None:
            specs = self.session.assign_workers(config)
            devices = [spec.device for spec in specs]
            lines.append(describe_plan(resolved, specs))
        found = forecast_notebook(request, self._shell.user_ns, config, devices)
        if request.output_format != "text":
            lines = []
        return "\n\n".join([*lines, *([] if found is None else [render(found, request.output_format)])])

    def _config(self, words: list[str]) -> str:
        if words[:1] == ["deepspeed"]:
            from accel_nb.config.deepspeed_report import show_deepspeed

            config = self._resolve(shlex.join(words[1:]), "%accelerate config deepspeed")
            shown = show_deepspeed(config, on_gpus=uses_gpus(config.config.gpus, config.config.cpus))
            return f"{shown.table}\n{shown.json}"
        return self._resolve(shlex.join(words), "%accelerate config").table()

    def _export(self, words: list[str]) -> str:
        from accel_nb.notebook.export.script import executed_cells, export_notebook, write_script

        if len(words) != 1 or not words[0].endswith(".py"):
            raise ConfigError(
                "%accelerate export takes the path of the new script, as in `%accelerate export train.py`"
            )
        inputs = self._shell.history_manager.input_hist_raw
        exported = export_notebook(
            executed_cells(inputs), [environment_layer(option_variables())], title="a notebook", script=words[0]
        )
        return write_script(exported, words[0], replaces=False).rstrip("\n")

    def _start(self, words: list[str]) -> str:
        config = self._resolve(shlex.join(words), "%accelerate start").config
        specs = self.session.assign_workers(config)
        self.session.start_workers(specs, config.engine)
        return f"{len(specs)} worker{'s are' if len(specs) != 1 else ' is'} ready"

    def _stop(self, words: list[str]) -> str:
        if words == ["--after-step"]:
            return self._request_action(StopAfterStep())
        if words:
            raise ConfigError(
                f"%accelerate stop {' '.join(words)}: `%accelerate stop` ends the workers, `%accelerate stop "
                "--after-step` the cell that runs in the background"
            )
        self.session.stop()
        return "workers ended"

    def _wait(self, words: list[str]) -> str:
        if self.session.background is None:
            raise PoolError(_NO_BACKGROUND)
        self.session.background.wait()
        return self.session.background.status()

    def _interrupt(self, words: list[str]) -> str:
        self._require_background().interrupt()
        return "interrupting; `%accelerate wait` waits for the end"

    def _checkpoint(self, words: list[str]) -> str:
        return self._request_action(SaveNow())

    def _set(self, words: list[str]) -> str:
        try:
            return "\n".join([self._request_action(action) for action in parse_set_arguments(words)])
        except ValueError as error:
            raise ConfigError(f"{' '.join(['%accelerate set', *words])}: {error}") from None

    def _inspect(self, words: list[str]) -> str:
        return self._request_action(Inspect(tuple(_parse_names(words, "inspect"))))

    def _attach(self, words: list[str]) -> None:
        background, last = self.session.background, self.session.last_run
        if last is None:
            raise PoolError("no cell has run on workers yet")
        if words and " ".join(words) != last.title:
            raise ConfigError(
                f"%accelerate attach {' '.join(words)}: there is no run of that name; the last one is {last.title!r}, "
                "which `%accelerate attach` shows"
            )
        if background is not None and background.running is last:
            background.attach()
        else:
            last.output.show_again()

    def _require_background(self) -> BackgroundRun:
        """Return the run in the background: the only one that can be active while a magic runs."""
        background = self.session.background
        if background is None or not background.is_running:
            raise PoolError(_NO_BACKGROUND)
        return background

    def _request_action(self, action: Action) -> str:
        """Request an action that all ranks execute at the end of a step, and return the outcome."""
        requested = self._require_background().running.controls.request(action)
        if not requested.wait(STEP_TIMEOUT_S):
            return f"requested; no step has ended within {STEP_TIMEOUT_S:g} s; it takes effect when one does"
        return describe_outcome(action, requested)

    def _restart(self, words: list[str]) -> str:
        self.session.stop()
        self.session.warm_up()
        poll_until_warm(self.session)
        return "workers ended; the next cell starts fresh ones with the notebook's values"

    def _connect(self, words: list[str]) -> str:
        flags = connect_flags(words)
        layer = parse_flags(shlex.join(flags), "%accelerate connect")
        layers = [environment_layer(option_variables()), *self.session.notebook_layers, layer]
        if not any({"cpus", "gpus"} & known.values.keys() for known in layers):
            # The number of workers is given with each cell.
            layers[-1] = parse_flags(shlex.join([*flags, "--cpus", "1"]), "%accelerate connect")
        self.session.connect(layer, resolve(layers).config.engine)
        return self._nodes([])

    def _nodes(self, words: list[str]) -> str:
        from accel_nb.notebook.reports.nodes import describe_nodes

        self.session.poll()
        return describe_nodes(self.session.engine_facts(), self.session.status().specs)

    def _logs(self, words: list[str]) -> str:
        logs = self.session.logs
        if not logs:
            return "no cell has run on workers yet"
        if not words:
            words = [str(rank) for rank in logs]
        wrong = [word for word in words if not word.isdecimal() or int(word) not in logs]
        if wrong:
            raise ConfigError(f"no rank {', '.join(wrong)}; the last cell ran on {ranks_text(logs)}")
        return "\n".join(f"--- rank {word}\n{logs[int(word)].text() or 'it printed nothing'}" for word in words)

    def _pull(self, words: list[str]) -> str:
        names = _parse_names(words, "pull")
        self.session.pull(names)
        return f"pulled {', '.join(names)}"

    def _push(self, words: list[str]) -> str:
        names = _parse_names(words, "push")
        self.session.push(names)
        return f"{', '.join(names)} will be sent with the next cell that uses {'it' if len(names) == 1 else 'them'}"


def _parse_names(words: list[str], command: str) -> list[str]:
    names = [name for word in words for name in word.split(",") if name]
    if not names or not all(name.isidentifier() for name in names):
        raise ConfigError(
            f"%accelerate {command} takes names of variables, as in `%accelerate {command} model history`"
        )
    return names


def connect_flags(words: list[str]) -> list[str]:
    """Return the flags for the arguments of `%accelerate connect`: the first word names the machines.

    Raises ConfigError without one.
    """
    if not words or words[0].startswith("-"):
        raise ConfigError(_CONNECT)
    target, rest = words[0], words[1:]
    if target in ENGINES:
        return ["--engine", target, *rest]
    if "," not in target and re.search(r":\d+$", target):
        return ["--engine", "ray", "--engine.address", target, *rest]
    hosts = ["--engine", "ssh", "--engine.hosts", target]
    has_number = any(word.partition("=")[0] == "--nodes" for word in rest)
    return [*hosts, *([] if has_number else ["--nodes", str(target.count(",") + 1)]), *rest]


def parse_set_arguments(words: list[str]) -> list[Action]:
    """Return the actions of the arguments of `%accelerate set`. Raise ValueError for one that is not allowed."""
    if not words:
        raise ValueError(_SETTINGS)
    actions: list[Action] = []
    for word in words:
        found = re.fullmatch(r"([\w-]+?)(\*?=)([^=]+)", word)
        try:
            name, operator, number = ("", "", 0.0) if found is None else (found[1], found[2], float(found[3]))
        except ValueError:
            raise ValueError(f"{word!r}: {_SETTINGS}") from None
        if (name, operator) == ("lr", "="):
            actions.append(SetLearningRate(number))
        elif (name, operator) == ("lr", "*="):
            actions.append(ScaleLearningRate(number))
        elif (name.replace("_", "-"), operator) == ("log-every", "=") and number.is_integer():
            actions.append(SetReportInterval(int(number)))
        else:
            raise ValueError(f"{word!r}: {_SETTINGS}")
    return actions


def _is_from_jupyterlab(shell: Any) -> bool:
    """Return whether the running cell came from a JupyterLab that answers comm messages while a cell runs."""
    kernel = getattr(shell, "kernel", None)
    if kernel is None or not getattr(kernel, "_supports_kernel_subshells", False):
        return False
    return "cellId" in shell.get_parent().get("metadata", {})


def session_of(shell: Any) -> Session:
    """Return the session of a shell, loading the extension if it is not loaded yet."""
    registry = shell.magics_manager.registry
    if AccelerateMagics.__name__ not in registry:
        load_ipython_extension(shell)
    return registry[AccelerateMagics.__name__].session


def load_ipython_extension(shell: Any) -> None:
    """Register the magics and the sidebar; a clean process starts importing torch in the background.

    Returns in milliseconds. Prints a warning for each requirement that is not met, since later errors would not name
    the package.
    """
    unload_ipython_extension(shell)
    for problem in unmet_requirements():
        print(problem, file=sys.stderr)
    magics = AccelerateMagics(shell)
    shell.register_magics(magics)
    magics.session.warm_up()
    # The first call of parse_flags imports its modules; called here in a thread, it does not delay the first cell.
    threading.Thread(target=parse_flags, args=("", "%load_ext"), name="accel_nb flags", daemon=True).start()
    shell.events.register("pre_run_cell", magics.apply_background_results)
    shell.events.register("post_run_cell", magics.release_unused)
    answers = request_handlers(magics.session, magics.settings)
    magics.sidebar = SidebarComm(shell, lambda: describe_state(magics.session), answers)
    magics.session.on_change = magics.sidebar.push
    poll_until_warm(magics.session)


def unload_ipython_extension(shell: Any) -> None:
    """End the workers and remove the magics; do nothing if they are not loaded."""
    magics = shell.magics_manager.registry.pop(AccelerateMagics.__name__, None)
    if magics is not None:
        shell.events.unregister("pre_run_cell", magics.apply_background_results)
        shell.events.unregister("post_run_cell", magics.release_unused)
        magics.session.stop()
        if magics.sidebar is not None:
            magics.sidebar.close()
    for kind in ("line", "cell"):
        shell.magics_manager.magics[kind].pop("accelerate", None)
