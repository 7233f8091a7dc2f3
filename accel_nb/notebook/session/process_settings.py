"""Process-wide settings, such as print options and log levels, which a notebook and its workers copy from each other.

`read_settings` returns those of a process as JSON; `apply_settings` sets them in the other. Settings of a library are
read only if the process has imported it.
"""

from __future__ import annotations

import decimal
import functools
import gc
import importlib
import locale
import logging
import os
import re
import socket
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

from IPython.core.getipython import get_ipython
from traitlets.config.application import Application

from accel_nb.errors import MisuseError
from accel_nb.notebook.session.fp32_precision import read_fp32_precision, set_fp32_precision
from accel_nb.notebook.session.log_handlers import (
    ChangedHandlers,
    add_handlers,
    read_handlers,
    remove_handlers,
    set_handlers,
)
from accel_nb.notebook.session.registered_functions import RegisteredFunctions
from accel_nb.runtime.process.environment import GPU_VARIABLE, notebook_variables, set_variables

logger = logging.getLogger(__name__)

_TORCH_PRINT = ("precision", "threshold", "edgeitems", "linewidth", "sci_mode")
_NUMPY_PRINT = ("edgeitems", "threshold", "floatmode", "precision", "suppress", "linewidth", "nanstr", "infstr", "sign")

_ATTENTION = {
    "flash_sdp_enabled": "enable_flash_sdp",
    "mem_efficient_sdp_enabled": "enable_mem_efficient_sdp",
    "math_sdp_enabled": "enable_math_sdp",
    "cudnn_sdp_enabled": "enable_cudnn_sdp",
}
"""Functions of torch that return whether a kernel of attention is allowed, and those that set it."""

_TEXT_FORMAT = ("float_precision", "pprint", "max_width", "max_seq_length")
"""Settings of the strings by which IPython shows values, as ``%precision`` and ``%pprint`` set them."""

_PLAIN = bool | int | float | str | None

_OWN_PLOT_PARAMETERS = frozenset(
    {"backend", "backend_fallback", "datapath", "docstring", "interactive", "keymap", "toolbar", "tk", "webagg"}
)
"""Parameters of matplotlib that belong to a process and its windows."""

_FILE_BACKENDS = frozenset({"agg", "cairo", "pdf", "pgf", "ps", "svg", "template"})
"""The backends of matplotlib that show no figures."""

_INLINE_BACKEND = "module://matplotlib_inline.backend_inline"

_PANDAS_OPTION = re.compile(
    r"^([a-z_.]+) :(?:(?!^[a-z_.]+ :).)*?\[default: (.*?)\] \[currently: (.*?)\]", re.MULTILINE | re.DOTALL
)
"""One option in the text of `pandas.describe_option`: its name, default and value."""

_USUAL_FLAGS = [True, False]
"""`propagate` and `disabled` of a new logger."""

_NOTEBOOK = re.compile(r"__main__\Z")
"""The modules to which workers limit the notebook's ``error`` filters: the notebook's code."""

EXIT_WARNING = "To exit: use"
"""IPython's warning at ``SystemExit``, which workers ignore: they report the code of the exit."""

REPEATED = frozenset({"accelerate_alias"})
"""Settings that are sent with each cell: workers that cannot apply one report this each time."""


class ChangedSettings:
    """The settings of this process that change from now on, until `find` has found changes."""

    def __init__(self) -> None:
        self._before = _read_all({})
        self._handlers = ChangedHandlers()
        self._functions = RegisteredFunctions(knows_present=True)

    def find(self) -> tuple[dict[str, Any], list[str]]:
        """Return the changes, for `apply_settings` in the notebook, and lines about changes that are not sent."""
        handlers, lines = self._handlers.find()
        lines += self._functions.describe_new(is_worker=True)
        return find_changes(self._before, _read_all(self._before)) | handlers, lines


def find_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of ``now`` that ``before`` lacks or has with another value; of dicts only such items."""
    found: dict[str, Any] = {}
    for name, value in now.items():
        old: Any = before.get(name)
        if name in before and old == value:
            continue
        has_items = isinstance(value, dict) and isinstance(old, dict)
        found[name] = find_changes(old, value) if has_items else value
    return found


def read_settings(before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of this process by name, JSON-ready; ``before`` is the result of the previous call."""
    found = _read_values(before)
    found["log_handlers"] = read_handlers()
    compat = sys.modules.get("accel_nb.compat.names.finder")
    if compat is not None and (compat.is_installed() or before.get("accelerate_alias")):
        found["accelerate_alias"] = compat.is_installed()
    return found


def _read_values(before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that are values, and not objects of this process."""
    found: dict[str, Any] = {
        "argv": [str(item) for item in sys.argv],
        "file_mask": _file_mask(),
        "recursion_limit": sys.getrecursionlimit(),
        "switch_interval": sys.getswitchinterval(),
        "traceback_limit": getattr(sys, "tracebacklimit", None),
        "collects_garbage": gc.isenabled(),
        "garbage_thresholds": list(gc.get_threshold()),
        "decimals": [decimal.getcontext().prec, decimal.getcontext().rounding],
        "socket_timeout": socket.getdefaulttimeout(),
        "log_disabled": logging.root.manager.disable,
        "log_warnings": logging._warnings_showwarning is not None,  # type: ignore[attr-defined]
        "locale": locale.setlocale(locale.LC_ALL),
        "warnings": _warnings(),
        # A level that was unset since the previous call is 0.
        "log_levels": dict.fromkeys(before.get("log_levels", ()), 0) | _log_levels(),
        "log_flags": dict.fromkeys(before.get("log_flags", ()), _USUAL_FLAGS) | _log_flags(),
    }
    if (shell := get_ipython()) is not None:
        found["shown_values"] = shell.ast_node_interactivity
        display: Any = shell.display_formatter
        text = display.formatters["text/plain"]
        found["shown_text"] = {name: getattr(text, name) for name in _TEXT_FORMAT}
    if (inline := sys.modules.get("matplotlib_inline.config")) is not None and inline.InlineBackend.initialized():
        found["figure_formats"] = _read_figure_formats(inline.InlineBackend.instance())
    if (numpy := sys.modules.get("numpy")) is not None:
        options = numpy.get_printoptions()
        found["numpy_print"] = {name: options[name] for name in _NUMPY_PRINT}
        found["numpy_errors"] = numpy.geterr()
    if (torch := sys.modules.get("torch")) is not None:
        options = torch._tensor_str.PRINT_OPTS
        found["torch_print"] = {name: getattr(options, name) for name in _TORCH_PRINT}
        found["torch_dtype"] = str(torch.get_default_dtype()).removeprefix("torch.")
        found["torch_grad"] = torch.is_grad_enabled()
        found["torch_validates"] = torch.distributions.Distribution._validate_args
        found["torch_fp32_precision"] = read_fp32_precision(torch)
        cudnn = torch.backends.cudnn
        found["torch_cudnn"] = [cudnn.enabled, cudnn.benchmark, cudnn.deterministic]
        deterministic = torch.are_deterministic_algorithms_enabled()
        found["torch_anomaly"] = [torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()]
        found["torch_deterministic"] = [deterministic, torch.is_deterministic_algorithms_warn_only_enabled()]
        found["torch_attention"] = {name: getattr(torch.backends.cuda, name)() for name in _ATTENTION}
        found["torch_sharing"] = torch.multiprocessing.get_sharing_strategy()
        if (kind := _default_device(torch)) is not None:
            found["torch_device"] = kind
        found["torch_hub"] = torch.hub._hub_dir  # None as long as the environment variable TORCH_HOME applies
    if (matplotlib := sys.modules.get("matplotlib")) is not None and hasattr(matplotlib, "rcParamsDefault"):
        if (colormap := _read_colormap(matplotlib)) is not None:
            found["plot_colormap"] = colormap
        found["plot_style"] = _read_plot_style(matplotlib, before.get("plot_style", ()))
        found["plot_backend"] = _read_plot_backend(matplotlib)
        found["plots_at_once"] = matplotlib.is_interactive()
    if hasattr(pandas := sys.modules.get("pandas"), "options"):
        found["pandas"] = _read_pandas(pandas, before.get("pandas", ()))
    if hasattr(sklearn := sys.modules.get("sklearn"), "get_config"):
        found["sklearn"] = _read_sklearn(sklearn, before.get("sklearn", ()))
    return found


def apply_settings(settings: Mapping[str, Any]) -> None:
    """Apply the result of `read_settings`, or a part of it, to this process."""
    for name, value in settings.items():
        _SETTERS[name](value)


@contextmanager
def kept_log_levels() -> Iterator[None]:
    """Set the levels of loggers, after the block, to those that they had before it.

    A library that is imported in the block may set its own, as it did in the notebook before code there chose another.
    """
    before = _log_levels()
    try:
        yield
    finally:
        _set_log_levels(before)


def apply_returned(settings: Mapping[str, Any]) -> list[str]:
    """Apply settings that a cell has changed; return a line for each that this process refuses."""
    lines: list[str] = []
    for name, value in settings.items():
        try:
            _SETTERS[name](value)
        except Exception as error:  # the values of the cell are applied nevertheless
            lines.append(
                f"the notebook keeps its setting {name}: the cell's is refused here ({type(error).__name__}: {error})"
            )
    return lines


def _read_all(before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values, and the folder, import path, variables and number of threads, which are set in other ways."""
    found = _read_values(before)
    variables = {name: value for name, value in notebook_variables().items() if name != GPU_VARIABLE}
    found["variables"] = {**dict.fromkeys(before.get("variables", ())), **variables}
    found["sys_path"] = [entry for entry in sys.path if isinstance(entry, str)]
    if (torch := sys.modules.get("torch")) is not None:  # workers have their own number of threads
        found["torch_threads"] = torch.get_num_threads()
    with suppress(FileNotFoundError):  # the folder may have been deleted
        found["folder"] = os.getcwd()
    return found


def _read_plot_style(matplotlib: Any, before: Iterable[str]) -> dict[str, Any]:
    """Return the parameters of matplotlib that differ from its defaults, or that did at the previous call.

    A cycle of colors is returned as the text of a literal, which matplotlib evaluates. Objects in a list, as the
    strokes of `matplotlib.pyplot.xkcd`, are left out: no literal describes them.
    """
    defaults = dict(dict.items(matplotlib.rcParamsDefault))
    found: dict[str, Any] = {}
    for name, value in dict.items(matplotlib.rcParams):
        if name.partition(".")[0] in _OWN_PLOT_PARAMETERS or (name not in before and value == defaults.get(name)):
            continue
        if name == "image.cmap":
            value = getattr(value, "name", value)
        if not isinstance(value, list):
            found[name] = value if isinstance(value, _PLAIN) else str(value)
        elif all(isinstance(item, _PLAIN) for item in value):
            found[name] = value
    return found


def _read_colormap(matplotlib: Any) -> list[Any] | None:
    """Return name and colors of the colormap of ``image.cmap``, unless it is matplotlib's default.

    An import such as seaborn's, or the notebook, may have registered it; the other process may lack it.
    """
    chosen: Any = dict.get(matplotlib.rcParams, "image.cmap")
    if chosen == dict.get(matplotlib.rcParamsDefault, "image.cmap"):
        return None
    colormap = matplotlib.colormaps.get(chosen) if isinstance(chosen, str) else chosen
    if colormap is None:
        return None
    extremes = [colormap.get_bad(), colormap.get_under(), colormap.get_over()]
    return [colormap.name, colormap(range(colormap.N)).tolist(), *(color.tolist() for color in extremes)]


def _set_colormap(value: list[Any]) -> None:
    matplotlib, colors = importlib.import_module("matplotlib"), importlib.import_module("matplotlib.colors")
    name, listed, bad, under, over = value
    if name not in matplotlib.colormaps:
        colormap = colors.ListedColormap(listed, name=name)
        colormap.set_extremes(bad=bad, under=under, over=over)
        matplotlib.colormaps.register(colormap, name=name)


def _read_plot_backend(matplotlib: Any) -> str:
    """Return the backend of matplotlib if it shows no figures, otherwise that of figures in the notebook.

    Workers have no windows.
    """
    backend = dict.get(matplotlib.rcParams, "backend")  # an ordinary look-up would choose a backend
    return backend if isinstance(backend, str) and backend.lower() in _FILE_BACKENDS else _INLINE_BACKEND


def _read_figure_formats(backend: Any) -> list[Any]:
    """Return the settings of `%config InlineBackend`: formats, arguments of printing, whether figures are closed."""
    arguments = {name: value for name, value in backend.print_figure_kwargs.items() if isinstance(value, _PLAIN)}
    return [sorted(backend.figure_formats), arguments, backend.close_figures]


def _set_figure_formats(values: list[Any]) -> None:
    backend = importlib.import_module("matplotlib_inline.config").InlineBackend.instance(parent=get_ipython())
    if _read_figure_formats(backend) != values:
        formats, arguments, closes = values
        backend.print_figure_kwargs = backend.print_figure_kwargs | arguments
        backend.figure_formats, backend.close_figures = set(formats), closes


def _set_shown_values(mode: str) -> None:
    """Set which values of a cell are shown, as ``last_expr`` or ``all``."""
    if (shell := get_ipython()) is not None:
        shell.ast_node_interactivity = mode


def _set_text_format(values: Mapping[str, Any]) -> None:
    if (shell := get_ipython()) is not None:
        display: Any = shell.display_formatter
        for name, value in values.items():
            setattr(display.formatters["text/plain"], name, value)


def _read_pandas(pandas: Any, before: Iterable[str]) -> dict[str, Any]:
    """Return the options of pandas that differ from its defaults, or that did at the previous call.

    Without any, workers need not import it.
    """
    options = _flat_options(pandas.options.d)
    listed = {*before, *_changed_options(repr(options))}
    return {name: value for name, value in options.items() if name in listed}


def _flat_options(options: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in options.items():
        if isinstance(value, dict):
            found |= _flat_options(value, f"{prefix}{name}.")
        elif isinstance(value, _PLAIN):
            found[prefix + name] = value
    return found


@functools.lru_cache(maxsize=1)
def _changed_options(values: str) -> frozenset[str]:
    """Return the names of pandas' options that differ from its defaults; the ``values`` of all are the cache key."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # at an option that is deprecated
        text = importlib.import_module("pandas").describe_option("", _print_desc=False)
    found = _PANDAS_OPTION.findall(text)
    return frozenset(name for name, default, value in found if default != value)


def _set_pandas(options: Mapping[str, Any]) -> None:
    if not options:
        return
    pandas = importlib.import_module("pandas")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # at an option that is deprecated
        for name, value in options.items():
            with suppress(Exception):  # an option that another version or engine of pandas does not have
                pandas.set_option(name, value)


def _read_sklearn(sklearn: Any, before: Iterable[str]) -> dict[str, Any]:
    """Return the configuration of scikit-learn as far as it differs from its defaults, or did at the previous call."""
    defaults = _sklearn_defaults()
    return {
        name: value
        for name, value in sklearn.get_config().items()
        if isinstance(value, _PLAIN) and (name in before or value != defaults.get(name))
    }


@functools.cache
def _sklearn_defaults() -> dict[str, Any]:
    """Return the configuration of a new thread, which has the defaults."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(importlib.import_module("sklearn").get_config).result()


def _set_sklearn(values: Mapping[str, Any]) -> None:
    if values:
        importlib.import_module("sklearn").set_config(**values)


def _set_plot_style(values: Mapping[str, Any]) -> None:
    if values:
        importlib.import_module("matplotlib").rcParams.update(values)


def _set_plot_backend(backend: str) -> None:
    matplotlib = importlib.import_module("matplotlib")
    if _read_plot_backend(matplotlib) == backend:
        return
    if backend != _INLINE_BACKEND:
        matplotlib.use(backend)
    elif (shell := get_ipython()) is not None:
        shell.enable_matplotlib("inline")


def limit_error_filters() -> None:
    """Limit the filters that raise any module's warnings to the notebook's code: on workers, libraries warn more."""
    warnings.filters[:] = [  # type: ignore[index]
        ("error", message, category, _NOTEBOOK, line) if action == "error" and module is None else entry
        for entry in warnings.filters
        for action, message, category, module, line in [entry]
    ]


def _warnings() -> list[list[Any]]:
    """Return the filters of warnings, each once: workers have ``error`` filters in the limited form and as sent."""
    found: list[list[Any]] = []
    for entry in warnings.filters:
        if (item := _filter_to_json(entry)) is not None and item not in found:
            found.append(item)
    return found


def _filter_to_json(entry: Any) -> list[Any] | None:
    """Return a filter of `warnings` as JSON; None for one that stays in its process.

    Not sent are ``error`` filters for a library's modules, since accel_nb's own calls around the cell could then raise,
    and the workers' filter for `EXIT_WARNING`.
    """
    action, message, category, module, line = entry
    if module is _NOTEBOOK:
        module = None
    if (action == "error" and module is not None) or getattr(message, "pattern", None) == EXIT_WARNING:
        return None
    texts = [[item.pattern, item.flags] if isinstance(item, re.Pattern) else item for item in (message, module)]
    return [action, texts[0], category.__module__, category.__qualname__, texts[1], line]


def _set_warnings(entries: list[list[Any]]) -> None:
    filters: list[Any] = []
    for action, message, module, name, source, line in entries:
        patterns = [re.compile(*item) if isinstance(item, list) else item for item in (message, source)]
        filters.append((action, patterns[0], _find_category(module, name), patterns[1], line))
    own = [entry for entry in warnings.filters if _filter_to_json(entry) is None]
    warnings.filters[:] = [*own, *filters]  # type: ignore[index]
    with warnings.catch_warnings():  # which invalidates the cache of shown warnings
        pass


def _find_category(module: str, name: str) -> type[Warning]:
    """Return a class of warnings; a placeholder if this process has not imported it."""
    parts = name.split(".")
    found: Any = functools.reduce(lambda owner, part: getattr(owner, part, None), parts, sys.modules.get(module))
    if isinstance(found, type):
        return found
    return _CategoryByName(parts[-1], (Warning,), {"__module__": module, "__qualname__": name})


class _CategoryByName(type):
    """The metaclass of a class of warnings that stands for the one of the same name, in filters of `warnings`."""

    def __subclasscheck__(cls, kind: type) -> bool:
        names = [(base.__module__, base.__qualname__) for base in kind.__mro__]
        return (cls.__module__, cls.__qualname__) in names


def _log_flags() -> dict[str, list[bool]]:
    """Return `propagate` and `disabled` of the loggers, by name, that differ from those of a new one."""
    flags = {
        name: [logger.propagate, bool(logger.disabled)]
        for name, logger in list(logging.root.manager.loggerDict.items())
        if isinstance(logger, logging.Logger)
    }
    return {name: found for name, found in flags.items() if found != _USUAL_FLAGS}


def _log_levels() -> dict[str, int]:
    """Return the levels of loggers by name, without that of the kernel's application, which workers do not have."""
    own = Application.instance().log if Application.initialized() else None
    known = list(logging.root.manager.loggerDict.items())
    levels = {
        name: logger.level
        for name, logger in known
        if isinstance(logger, logging.Logger) and logger.level and logger is not own
    }
    return {"": logging.root.level, **levels}


def _file_mask() -> int:
    """Return the mask of new files' permissions, which `os` returns only as it sets another one.

    A file that another thread creates in between is its owner's only. Linux has the mask in a file too, whose reading
    takes a third of a millisecond.
    """
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _set_folder(path: str) -> None:
    with suppress(FileNotFoundError):  # on the machine of the workers only
        os.chdir(path)


def _disable_logging(level: int) -> None:
    """Set the disabled level if it changes: a call clears the caches of all loggers, a megabyte in each worker."""
    if logging.root.manager.disable != level:
        logging.disable(level)


def _set_log_levels(levels: Mapping[str, int]) -> None:
    """Set the levels that change: a call clears the caches of all loggers, a megabyte in each worker."""
    for name, level in levels.items():
        logger = logging.getLogger(name or None)
        if logger.level != level:
            logger.setLevel(level)


def _set_log_flags(flags: Mapping[str, list[bool]]) -> None:
    for name, (propagates, is_disabled) in flags.items():
        logger = logging.getLogger(name)
        logger.propagate, logger.disabled = propagates, is_disabled


def _set_locale(value: str) -> None:
    """Set the locale; log a warning if this machine lacks it, as another node or image may."""
    try:
        locale.setlocale(locale.LC_ALL, value)
    except locale.Error:
        logger.warning(
            "The locale %s of the other process is not installed on %s, where numbers and dates are written as in %s. "
            "Install it there, or set another one by locale.setlocale.",
            value,
            socket.gethostname(),
            locale.setlocale(locale.LC_ALL),
        )


def _set_traceback_limit(limit: int | None) -> None:
    if limit is not None:
        sys.tracebacklimit = limit
    elif hasattr(sys, "tracebacklimit"):
        del sys.tracebacklimit


def _set_decimals(values: tuple[int, str]) -> None:
    decimal.getcontext().prec, decimal.getcontext().rounding = values


def _set_torch_print(values: Mapping[str, Any]) -> None:
    torch = _torch()
    # torch sets sci_mode to None, which is its automatic choice, if it is not passed.
    torch.set_printoptions(**{"sci_mode": torch._tensor_str.PRINT_OPTS.sci_mode, **values})


def _set_cudnn(values: tuple[bool, bool, bool]) -> None:
    cudnn = _torch().backends.cudnn
    cudnn.enabled, cudnn.benchmark, cudnn.deterministic = values


def _default_device(torch: Any) -> str | None:
    """Return the type of the device of new tensors; None if this machine does not have such a device."""
    try:
        return torch.get_default_device().type
    except AttributeError:  # torch 2.9, after it was set to None
        return "cpu"
    except (AssertionError, RuntimeError):
        return None


def _set_default_device(kind: str) -> None:
    """Set the device of new tensors by its type: each process has an index of its own."""
    torch = _torch()
    if _default_device(torch) != kind:
        torch.set_default_device(None if kind == "cpu" else kind)


def _set_attention(values: Mapping[str, bool]) -> None:
    for name, is_allowed in values.items():
        getattr(_torch().backends.cuda, _ATTENTION[name])(is_allowed)


def _torch() -> Any:
    return importlib.import_module("torch")


def _numpy() -> Any:
    return importlib.import_module("numpy")


def _set_alias(is_installed: bool) -> None:
    compat = importlib.import_module("accel_nb.compat")
    try:
        compat.install() if is_installed else compat.uninstall()
    except MisuseError as error:
        raise MisuseError(
            "the notebook has called accel_nb.compat.install(), but a cell has imported accelerate itself in the "
            "workers before; start new ones with %accelerate restart"
        ) from error


_SETTERS: Mapping[str, Callable[[Any], object]] = {
    "argv": lambda value: sys.argv.__setitem__(slice(None), value),
    "recursion_limit": sys.setrecursionlimit,
    "locale": _set_locale,
    "warnings": _set_warnings,
    "log_levels": _set_log_levels,
    "log_flags": _set_log_flags,
    "log_handlers": set_handlers,
    "removed_handlers": remove_handlers,
    "added_handlers": add_handlers,
    "folder": _set_folder,
    "sys_path": lambda value: sys.path.__setitem__(slice(None), value),
    "variables": set_variables,
    "switch_interval": sys.setswitchinterval,
    "traceback_limit": _set_traceback_limit,
    "collects_garbage": lambda value: gc.enable() if value else gc.disable(),
    "garbage_thresholds": lambda value: gc.set_threshold(*value),
    "decimals": _set_decimals,
    "socket_timeout": socket.setdefaulttimeout,
    "log_disabled": _disable_logging,
    "log_warnings": logging.captureWarnings,
    "file_mask": os.umask,
    "torch_cudnn": _set_cudnn,
    "torch_attention": _set_attention,
    "torch_sharing": lambda value: _torch().multiprocessing.set_sharing_strategy(value),
    "torch_device": _set_default_device,
    "torch_hub": lambda value: setattr(_torch().hub, "_hub_dir", value),
    "shown_values": _set_shown_values,
    "shown_text": _set_text_format,
    "figure_formats": _set_figure_formats,
    "plots_at_once": lambda value: importlib.import_module("matplotlib").interactive(value),
    "plot_backend": _set_plot_backend,
    "pandas": _set_pandas,
    "sklearn": _set_sklearn,
    "numpy_print": lambda value: _numpy().set_printoptions(**value),
    "numpy_errors": lambda value: _numpy().seterr(**value),
    "torch_print": _set_torch_print,
    "torch_threads": lambda value: _torch().set_num_threads(value),
    "torch_dtype": lambda value: _torch().set_default_dtype(getattr(_torch(), value)),
    "torch_grad": lambda value: _torch().set_grad_enabled(value),
    "torch_validates": lambda value: _torch().distributions.Distribution.set_default_validate_args(value),
    "torch_fp32_precision": lambda value: set_fp32_precision(_torch(), value),
    "accelerate_alias": _set_alias,
    "torch_anomaly": lambda value: _torch().autograd.set_detect_anomaly(value[0], check_nan=value[1]),
    "plot_colormap": _set_colormap,
    "plot_style": _set_plot_style,
    "torch_deterministic": lambda value: _torch().use_deterministic_algorithms(value[0], warn_only=value[1]),
}
