"""``notebook_launcher``: run a function on all devices, from a notebook or a script, and return its results."""

from __future__ import annotations

import ast
import atexit
import functools
import multiprocessing
import re
import socket
import string
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from IPython.core.getipython import get_ipython

from accel_nb.config import Layer, Resolved, environment_layer
from accel_nb.errors import GROUPS, ConfigError, MisuseError, PoolError, ShippingError
from accel_nb.notebook.cells.call import FunctionCall
from accel_nb.notebook.session.engines import start_engine
from accel_nb.notebook.session.error_translation import is_option_timeout
from accel_nb.notebook.session.restarts import require_checkpoint, run_with_restarts
from accel_nb.notebook.session.run_state import Cell
from accel_nb.notebook.session.session import Session
from accel_nb.pool.engine import WorkerSpec
from accel_nb.pool.pool import START_TIMEOUT_S
from accel_nb.runtime.devices.registry import device_type
from accel_nb.runtime.process.environment import option_variables, torchrun_world
from accel_nb.runtime.process.hardware import find_gpus
from accel_nb.runtime.process.platforms import find_tpu

_SCRIPT_SESSION = "__accel_nb_session__"
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_BACKENDS = ("static", "c10d")
_ADDRESS, _PORT = "127.0.0.1", "29500"
_LOOPBACK = (_ADDRESS, "localhost", "::1", "[::1]")
_PREFIX_FIELDS = ("role_name", "rank", "local_rank")


def notebook_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: str | int | None = _PORT,
    master_addr: str = _ADDRESS,
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: Mapping[str, Any] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
    **options: Any,
) -> list[Any]:
    """Run ``function(*args)`` on every worker, unchanged, and return the results in rank order.

    This process is never forked: CUDA may already be initialized, accelerators constructed and threads running here.
    The workers, and their objects on the devices, stay for the next launch or ``%%accelerate`` cell.

    **Results.** One value for each rank. A value that refers to a model, an optimizer or a container of the notebook is
    returned as that same object. Models, optimizers, schedulers and containers that the function used, as arguments,
    through closures or as globals, have rank 0's state afterwards, in place. Globals that it binds are bound here with
    rank 0's values. A value that cannot be copied raises ShippingError, after the trained state has been applied.

    **Interrupt.** KeyboardInterrupt in this process, normally within half a second, also where ranks wait in a
    collective. The training so far is returned; the workers keep running with their state. A rank that the interrupt
    does not reach within two seconds, or before a second one, is killed and replaced. Code that handles the
    KeyboardInterrupt continues; a second interrupt raises it once more.

    **Error.** The first rank that raises stops the others, and its exception is raised here with its own type and a
    traceback of the function's lines on that rank; errors of other ranks are one line each. Rank 0's training is
    returned.

    **Death.** WorkerDied names the rank, the signal or exit code and its last output. A new worker replaces it; this
    process keeps the values from before the launch.

    **Hang.** A rank that the others wait for is named within seconds, with its current line; no process is ended. Only
    the option ``timeout`` ends a launch automatically, with TimeoutError.

    Signal handlers, environment variables and threads of this process are restored afterwards. Call it in one process
    only, neither under ``torchrun`` nor inside a launched function (MisuseError). Concurrent launches in several
    threads each have their own workers and GPUs.

    Args:
        function: called on each worker; it may be defined in a cell, a lambda, a closure or a bound method. No model
            is prepared unless it constructs an ``Accelerator`` and calls its ``prepare``.
        args: positional arguments.
        num_processes: workers, one for each GPU; CPU workers, which share the cores, where there is no GPU. None:
            every visible GPU, else one CPU worker. On a TPU there is one worker for all chips in any case.
        mixed_precision: precision of the accelerators that the function constructs: ``fp16``, ``bf16`` or ``auto``.
            ``no`` keeps their own defaults.
        use_port: ``MASTER_PORT`` for process groups that the function itself opens; None or 0 chooses a free one. The
            launch uses no port.
        master_addr: ``MASTER_ADDR`` for process groups that the function itself opens. The launch uses no address: that
            of another machine has no effect on it, and a line reports this.
        node_rank, num_nodes: 0 and 1: one machine.
        rdzv_backend: ``static`` or ``c10d``: equivalent with one machine, and a line reports this.
        rdzv_endpoint: ``host:port``, in place of ``master_addr`` and ``use_port``.
        rdzv_conf: ``timeout`` in seconds: how long workers may take to start.
        rdzv_id: ``TORCHELASTIC_RUN_ID`` in the function's environment.
        max_restarts: how often all workers are restarted, with this process's values, when a rank dies or raises.
            With the option ``checkpoint={"dir": ...}`` accelerators resume from the newest checkpoint.
        monitor_interval: seconds between polls of the workers; their messages are always processed at once.
        log_line_prefix_template: a prefix for each line, such as ``"[${role_name}${rank}]: "``, with ``rank``,
            ``local_rank`` and ``role_name``; if set, the lines of every rank are shown.
        options: any option of ``%%accelerate``, by its name: ``seed=0``, ``accumulate=4``, ``panel=False``.

    Raises:
        ConfigError: for arguments that are not allowed. It names all of them, and nothing has started.
    """
    _refuse_in_worker("notebook_launcher")
    problems = _find_call_problems(function, args)
    problems += _find_problems(use_port, node_rank, num_nodes, rdzv_backend, rdzv_conf, max_restarts)
    problems += _find_format_problems(monitor_interval, rdzv_endpoint, log_line_prefix_template)
    if problems:
        raise ConfigError(problems)
    given = dict(options)
    if mixed_precision != "no":
        given["precision"] = mixed_precision
    address, _, port = rdzv_endpoint.rpartition(":")
    call = FunctionCall(
        functools.partial(function, *args),
        getattr(function, "__name__", type(function).__name__),
        variables={
            "MASTER_ADDR": address or master_addr,
            "MASTER_PORT": port or str(_choose_port(use_port)),
            "TORCHELASTIC_RUN_ID": rdzv_id,
            "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        },
        line_prefix=None
        if log_line_prefix_template is None
        else functools.partial(_format_line_prefix, log_line_prefix_template),
        notes=tuple(_describe_unused_arguments(use_port, master_addr, rdzv_backend, rdzv_endpoint)),
        poll_s=monitor_interval,
        start_timeout_s=float((rdzv_conf or {}).get("timeout", START_TIMEOUT_S)),
    )
    if max_restarts:
        given["max_restarts"] = max_restarts
    return _launch(call, given, num_processes, "notebook_launcher")


def debug_launcher(function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2) -> list[Any]:
    """Run ``function(*args)`` on CPU workers, even if there are GPUs. Returns and raises as `notebook_launcher`."""
    _refuse_in_worker("debug_launcher")
    if problems := _find_call_problems(function, args):
        raise ConfigError(problems)
    name = getattr(function, "__name__", type(function).__name__)
    call = FunctionCall(functools.partial(function, *args), name, variables={"MASTER_PORT": str(_choose_port(0))})
    return _launch(call, {"cpus": num_processes}, None, "debug_launcher")


def _launch(call: FunctionCall, given: dict[str, Any], num_processes: int | None, source: str) -> list[Any]:
    places: dict[str, str] = {}
    if num_processes is not None:
        has_gpus = bool(find_gpus())
        if has_gpus or find_tpu() is None:
            kind = "gpus" if has_gpus else "cpus"
            given[kind], places[kind] = num_processes, f"{source}(num_processes={num_processes!r})"
        else:
            note = f"num_processes={num_processes!r} has no effect: on a TPU one worker uses all chips"
            call = replace(call, notes=(*call.notes, note))
    main = _find_session()
    layers = [environment_layer(option_variables()), *main.notebook_layers, *main.connected_layers]
    layers.append(Layer("flags", given, f"{source}(...)", places))
    resolved = main.resolve(layers)
    config = resolved.config
    with main.device_claims.reserving_next(lambda taken: main.assign_workers(config, num_reserved=taken)) as (
        specs,
        first,
    ):
        if first == 0 and main.reserve():
            try:
                return _run(main, call, resolved, specs)
            finally:
                main.release()
        session = _concurrent_session(main, specs, first)
        try:
            name = f"{call.bound_name}_{threading.get_ident()}"
            return _run(session, replace(call, bound_name=name), resolved, specs)
        finally:
            session.stop()


def _run(session: Session, call: FunctionCall, resolved: Resolved, specs: Sequence[WorkerSpec]) -> list[Any]:
    """Run the call, with restarts if it fails."""
    resolved.check_world(len(specs))
    require_checkpoint(resolved)
    try:
        cell = _make_cell(call, session.namespace)
        return run_with_restarts(session, cell, resolved, specs, mode=_panel_mode(resolved))
    except ShippingError as error:
        raise ShippingError(call.describe_unsendable_part(session.namespace) or str(error)) from None
    except ConfigError:
        raise
    except Exception as error:
        if not is_option_timeout(error):
            _set_remote_traceback(error)
        raise


def _make_cell(call: FunctionCall, namespace: Mapping[str, Any]) -> Cell:
    """Return the call as a cell. A function that is bound to its name in the notebook is sent once, as that name."""
    name = call.name if namespace.get(call.name) is call.function.func else "None"
    source = f"{name}\n{call.bound_name}()"
    return Cell(source, ast.parse(source), 0, call)


def _panel_mode(resolved: Resolved) -> str:
    if get_ipython() is None or not resolved.config.panel:
        return "off"
    return "static" if resolved.config.static else "live"


def _find_session() -> Session:
    """Return the session of this notebook, or of this script, where it is stored in ``__main__``."""
    shell = get_ipython()
    if shell is not None:
        from accel_nb.notebook.magics import session_of

        return session_of(shell)
    namespace = sys.modules["__main__"].__dict__
    if _SCRIPT_SESSION not in namespace:
        namespace[_SCRIPT_SESSION] = Session(namespace, start_engine)
        atexit.register(namespace[_SCRIPT_SESSION].stop)
    return namespace[_SCRIPT_SESSION]


def _concurrent_session(main: Session, specs: Sequence[WorkerSpec], first: int) -> Session:
    """Return a session with its own workers, to which only its own GPUs are visible."""
    kinds = [kind for spec in specs if (kind := device_type(spec.device)).one_per_worker]
    overrides = kinds[0].visible_variables(first, len(kinds)) if kinds else {}
    return Session(
        main.namespace, main.start_engine, main.hidden_names, overrides=overrides, namespace_lock=main.namespace_lock
    )


def _set_remote_traceback(error: BaseException) -> None:
    """Set the worker's traceback as the error's cause where it is not shown: outside a notebook, and of groups."""
    render = vars(error).get("_render_traceback_")
    if render is not None and (get_ipython() is None or isinstance(error, GROUPS)):
        error.__cause__ = PoolError("\n" + _ANSI.sub("", "\n".join(render())))


def _refuse_in_worker(name: str) -> None:
    world = torchrun_world()
    if world is not None:
        raise MisuseError(
            f"{name} was called on rank {world.rank} of {world.size}, which is a worker already; call the function "
            "itself here, and the launcher in the notebook or in a script that is started without torchrun"
        )
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise MisuseError(
            f"{name} was called while a child process imported this script; put the call below "
            "`if __name__ == '__main__':`"
        )


def _find_call_problems(function: Any, args: Any) -> list[str]:
    problems: list[str] = []
    if not callable(function):
        problems.append(f"function is {function!r}, which cannot be called; give the function itself")
    if isinstance(args, str | bytes) or not isinstance(args, Sequence):
        problems.append(
            f"args is of type {type(args).__name__}: give a tuple or list of the function's arguments, one of them as "
            "args=(value,)"
        )
    return problems


def _find_problems(
    use_port: Any,
    node_rank: Any,
    num_nodes: Any,
    rdzv_backend: Any,
    rdzv_conf: Mapping[str, Any] | None,
    max_restarts: Any,
) -> list[str]:
    problems: list[str] = []
    if str(use_port) != "None" and not (str(use_port).isdecimal() and int(use_port) < 65536):
        problems.append(f"use_port={use_port!r}: give a port from 1 to 65535, or None for a free one")
    if num_nodes != 1 or node_rank != 0:
        problems.append(
            f"num_nodes={num_nodes!r}, node_rank={node_rank!r}: a launch uses this machine only (1 and 0); for several "
            "machines, write the function into a script and start it on each with torchrun --nnodes"
        )
    if rdzv_backend not in _BACKENDS:
        problems.append(f"rdzv_backend={rdzv_backend!r}: give {' or '.join(_BACKENDS)}")
    seconds = (rdzv_conf or {"timeout": 1}).get("timeout")
    if set(rdzv_conf or {}) - {"timeout"} or not isinstance(seconds, int | float) or not seconds > 0:
        problems.append(f"rdzv_conf={rdzv_conf!r}: give None or {{'timeout': seconds}}")
    if not isinstance(max_restarts, int) or max_restarts < 0:
        problems.append(f"max_restarts={max_restarts!r}: give 0 or a whole number of restarts")
    return problems


def _describe_unused_arguments(use_port: Any, master_addr: str, rdzv_backend: str, rdzv_endpoint: str) -> list[str]:
    """Return a line for each argument that has no effect on a launch."""
    lines: list[str] = []
    if rdzv_endpoint:
        given = {"master_addr": (master_addr, _ADDRESS), "use_port": (str(use_port), _PORT)}
        address, _, port = rdzv_endpoint.rpartition(":")
        lines += [
            f"{name}={value!r} has no effect: rdzv_endpoint={rdzv_endpoint!r} replaces it"
            for (name, (value, default)), used in zip(given.items(), (address, port), strict=True)
            if value not in (default, used)
        ]
        name, value = "rdzv_endpoint", rdzv_endpoint
    else:
        name, value, address = "master_addr", master_addr, master_addr
    if address not in _LOOPBACK:
        lines.append(
            f"{name}={value!r} has no effect on the launch, which uses this machine only; it is MASTER_ADDR in the "
            "function's environment. For several machines, start a script with `accel-nb launch --nnodes N`"
        )
    if rdzv_backend != _BACKENDS[0]:
        lines.append(f"rdzv_backend={rdzv_backend!r} has no effect: one machine needs no rendezvous")
    return lines


def _find_format_problems(monitor_interval: Any, rdzv_endpoint: str, template: str | None) -> list[str]:
    problems: list[str] = []
    if not isinstance(monitor_interval, int | float) or not 0 < monitor_interval <= 60:
        problems.append(f"monitor_interval={monitor_interval!r}: give seconds, more than 0 and up to 60")
    if rdzv_endpoint and not re.fullmatch(r"[^:\s]+:\d{1,5}", rdzv_endpoint):
        problems.append(f"rdzv_endpoint={rdzv_endpoint!r}: give host:port, or nothing")
    if template is not None:
        try:
            string.Template(template).substitute(dict.fromkeys(_PREFIX_FIELDS, ""))
        except (KeyError, ValueError) as error:
            named = ", ".join(f"${{{name}}}" for name in _PREFIX_FIELDS)
            problems.append(f"log_line_prefix_template={template!r}: {error}; it may use {named}")
    return problems


def _format_line_prefix(template: str, rank: int) -> str:
    return string.Template(template).substitute(role_name="default", rank=rank, local_rank=rank)


def _choose_port(use_port: str | int | None) -> int:
    if use_port not in (None, 0, "0"):
        return int(use_port)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
