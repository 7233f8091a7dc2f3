"""Export of metrics to a collector of OpenTelemetry, by OTLP over HTTP."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Any

from accel_nb.runtime.process.environment import get_variable
from accel_nb.telemetry.metrics.metric_values import METRICS, MetricValue

EXPORT_EVERY_MS = 5000
CLOSE_TIMEOUT_MS = 3000


class OpenTelemetry:
    """Sends metrics every few seconds, in a thread of the SDK.

    The SDK's environment variables ``OTEL_...`` apply, except for the endpoint and the interval.
    """

    def __init__(self, endpoint: str) -> None:
        """Create a separate meter provider: the process's global one belongs to the user."""
        sdk: Any = import_module("opentelemetry.sdk.metrics")
        export: Any = import_module("opentelemetry.sdk.metrics.export")
        otlp: Any = import_module("opentelemetry.exporter.otlp.proto.http.metric_exporter")
        resources: Any = import_module("opentelemetry.sdk.resources")
        reader = export.PeriodicExportingMetricReader(
            otlp.OTLPMetricExporter(endpoint=endpoint), export_interval_millis=EXPORT_EVERY_MS
        )
        name = get_variable("OTEL_SERVICE_NAME", "accel_nb")
        resource = resources.Resource.create({"service.name": name})
        self._endpoint = endpoint
        self._provider = sdk.MeterProvider([reader], resource=resource, shutdown_on_exit=False)
        meter = self._provider.get_meter("accel_nb")
        make = {"counter": meter.create_counter, "gauge": meter.create_gauge, "histogram": meter.create_histogram}
        self._instruments = {
            name: make[metric.kind](_otel_name(name), unit=metric.unit, description=metric.help)
            for name, metric in METRICS.items()
        }

    def export(self, values: Iterable[MetricValue]) -> None:
        """Update the metrics by new values."""
        for entry in values:
            metric, instrument = METRICS[entry.name], self._instruments[entry.name]
            attributes = dict(zip(metric.labels, entry.labels, strict=True))
            match metric.kind:
                case "counter":
                    instrument.add(entry.value, attributes)
                case "gauge":
                    instrument.set(entry.value, attributes)
                case "histogram":
                    instrument.record(entry.value, attributes)

    def flush(self) -> None:
        """Do nothing: the SDK's thread sends every few seconds, so that a slow collector does not block."""

    def describe(self) -> str:
        """Return the destination of the metrics."""
        return f"metrics to {self._endpoint} by OpenTelemetry"

    def close(self) -> None:
        """Send the last state and stop."""
        self._provider.shutdown(timeout_millis=CLOSE_TIMEOUT_MS)


def _otel_name(name: str) -> str:
    """Return the name of a metric in OpenTelemetry, where the unit is no part of it."""
    return "accel_nb." + name.removeprefix("accel_nb_").removesuffix("_seconds").removesuffix("_bytes")
