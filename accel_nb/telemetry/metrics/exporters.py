"""The monitoring systems to which the options export metrics; an exporter that fails is logged once and closed."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Protocol

from accel_nb.config.sections import MetricsOptions
from accel_nb.errors import ConfigError
from accel_nb.telemetry.events import Event, MetricLogged
from accel_nb.telemetry.metrics.metric_values import MAX_NAMES, MetricValue, metric_values

logger = logging.getLogger(__name__)


class Exporter(Protocol):
    """Sends values to a monitoring system."""

    def export(self, values: Iterable[MetricValue]) -> None:
        """Send values, or keep them until the next `flush`; must not block."""
        ...

    def flush(self) -> None:
        """Send the values that were kept; called when a run has ended."""
        ...

    def describe(self) -> str:
        """Return a line for the user that names the destination of the metrics."""
        ...

    def close(self) -> None:
        """Send the values that were kept, and close connections and files."""
        ...


class Exporters:
    """The exporters of one process; they stay open between runs as long as the options stay the same."""

    def __init__(self) -> None:
        self._options = MetricsOptions()
        self._open: list[Exporter] = []
        self._names: set[str] = set()

    def use(self, options: MetricsOptions) -> list[str]:
        """Open the exporters that the options select and close all others; return a line for each destination.

        Raises `ConfigError` if one cannot be opened: a missing package, a port in use, an unknown host.
        """
        if options == self._options:
            return []
        self.close()
        try:
            for name, build in _selected_exporters(options):
                self._open.append(_build_exporter(name, build))
        except ConfigError:
            self.close()
            raise
        self._options = options
        return [exporter.describe() for exporter in self._open]

    def export(self, events: Iterable[Event]) -> None:
        """Export the values of events; never raises."""
        if not self._open:
            return
        values = [value for event in events if self._is_exported(event) for value in metric_values(event)]
        for exporter in list(self._open):
            self._guarded(exporter, lambda exporter=exporter: exporter.export(values))

    def flush(self) -> None:
        """Send the exported values that are buffered; call when a run has ended."""
        for exporter in list(self._open):
            self._guarded(exporter, exporter.flush)

    def close(self) -> None:
        """Close every exporter. May be called again."""
        while self._open:
            exporter = self._open.pop()
            self._guarded(exporter, exporter.close)
        self._options = MetricsOptions()

    def _is_exported(self, event: Event) -> bool:
        if not isinstance(event, MetricLogged) or event.name in self._names:
            return True
        if len(self._names) == MAX_NAMES:
            return False
        self._names.add(event.name)
        if len(self._names) == MAX_NAMES:
            logger.warning("metrics: %d names are logged; names after %r are not exported", MAX_NAMES, event.name)
        return True

    def _guarded(self, exporter: Exporter, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:
            logger.warning(
                "%s: export failed and is switched off; the run continues", exporter.describe(), exc_info=True
            )
            if exporter in self._open:
                self._open.remove(exporter)
                with suppress(Exception):  # the failure has been reported
                    exporter.close()


def _selected_exporters(options: MetricsOptions) -> list[tuple[str, Callable[[], Exporter]]]:
    """Return the option of each exporter that the options select, and a function that opens it."""
    selected: list[tuple[str, Callable[[], Exporter]]] = []
    port, textfile, statsd, otlp = options.port, options.textfile, options.statsd, options.otlp
    if port is not None or textfile is not None:
        _require_package("prometheus_client", "metrics", "metrics.port" if port is not None else "metrics.textfile")
        from accel_nb.telemetry.metrics.prometheus import Endpoint, Textfile

        if port is not None:
            selected.append((f"metrics.port: {port}", lambda: Endpoint(port)))
        if textfile is not None:
            selected.append((f"metrics.textfile: {textfile}", lambda: Textfile(textfile)))
    if statsd is not None:
        from accel_nb.telemetry.metrics.statsd import Statsd

        tagged = options.statsd_tags
        selected.append((f"metrics.statsd: {statsd}", lambda: Statsd(statsd, tagged=tagged)))
    if otlp is not None:
        _require_package("opentelemetry", "otel", "metrics.otlp")
        from accel_nb.telemetry.metrics.otel import OpenTelemetry

        selected.append((f"metrics.otlp: {otlp}", lambda: OpenTelemetry(otlp)))
    return selected


def _build_exporter(name: str, build: Callable[[], Exporter]) -> Exporter:
    try:
        return build()
    except (OSError, ImportError, ValueError, OverflowError) as error:
        raise ConfigError(f"{name} cannot be used ({error}); use another value, or remove the option") from error


def _require_package(package: str, extra: str, option: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"{option} needs the package {package}: pip install accel_nb[{extra}]")
