"""Prometheus: an endpoint on loopback, and files for the node exporter's textfile collector."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from accel_nb.telemetry.metrics.metric_values import METRICS, MetricValue

WRITE_EVERY_S = 5.0
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class PrometheusMetrics:
    """The metrics as objects of prometheus_client, which any thread may read."""

    def __init__(self) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        self.registry = CollectorRegistry()
        self._metrics: dict[str, Any] = {}
        for name, metric in METRICS.items():
            if metric.kind == "histogram":
                self._metrics[name] = Histogram(
                    name, metric.help, metric.labels, registry=self.registry, buckets=_SECONDS
                )
            else:
                metric_class = Counter if metric.kind == "counter" else Gauge
                self._metrics[name] = metric_class(name, metric.help, metric.labels, registry=self.registry)

    def export(self, values: Iterable[MetricValue]) -> None:
        """Update the metrics by new values."""
        for entry in values:
            metric = self._metrics[entry.name]
            child = metric.labels(*entry.labels) if entry.labels else metric
            match METRICS[entry.name].kind:
                case "counter":
                    child.inc(entry.value)
                case "gauge":
                    child.set(entry.value)
                case "histogram":
                    child.observe(entry.value)

    def flush(self) -> None:
        """Do nothing: Prometheus reads the metrics from memory."""


class Endpoint(PrometheusMetrics):
    """Serves ``http://127.0.0.1:PORT/metrics``, on the loopback interface only; port 0 stands for a free port."""

    def __init__(self, port: int) -> None:
        """Start to listen; raises OSError if the port is in use."""
        from prometheus_client import start_http_server

        super().__init__()
        self._server, self._thread = start_http_server(port, addr="127.0.0.1", registry=self.registry)
        self._thread.name = "accel_nb metrics"
        self.port: int = self._server.server_port

    def describe(self) -> str:
        """Return where the metrics are."""
        return f"metrics at http://127.0.0.1:{self.port}/metrics"

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class Textfile(PrometheusMetrics):
    """Writes a ``.prom`` file atomically, every few seconds while values arrive, and at the end of a run."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = Path(path).expanduser().absolute()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._write_at = 0.0

    def export(self, values: Iterable[MetricValue]) -> None:
        """Update the metrics, and write the file if the last write was more than `WRITE_EVERY_S` ago."""
        super().export(values)
        if time.monotonic() >= self._write_at:
            self.flush()

    def flush(self) -> None:
        """Write the file."""
        from prometheus_client import write_to_textfile

        write_to_textfile(str(self._path), self.registry)
        self._write_at = time.monotonic() + WRITE_EVERY_S

    def describe(self) -> str:
        """Return where the metrics are."""
        return f"metrics in {self._path}"

    def close(self) -> None:
        """Write the last state."""
        self.flush()
