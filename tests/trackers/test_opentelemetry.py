"""OpenTelemetry with its real SDK: what a collector on loopback receives, and one that is not there."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib import import_module
from typing import Any

import pytest

from accel_nb.config.sections import MetricsOptions
from accel_nb.telemetry.events import CheckpointSaved, MemorySample, StepDone
from accel_nb.telemetry.metrics import Exporters


@pytest.fixture
def collector() -> Iterator[tuple[str, list[bytes]]]:
    bodies: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Print nothing."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1/metrics", bodies
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_collector_gets_every_kind_of_metric(collector: tuple[str, list[bytes]]) -> None:
    url, bodies = collector
    exporters = Exporters()
    assert exporters.use(MetricsOptions(otlp=url)) == [f"metrics to {url} by OpenTelemetry"]
    exporters.export([StepDone(1, 7, 1.0, 0.5, 0.01, 0.25, 32), MemorySample(1, 7, 1.0, 10, 20, 30, 40, 50, 60)])
    exporters.export([StepDone(1, 8, 2.0, 0.4, 0.01, 0.25, 32), CheckpointSaved(0, 8, 2.0, "/x", 0.1, 0.2, 99)])
    exporters.close()
    request = import_module("opentelemetry.proto.collector.metrics.v1.metrics_service_pb2").ExportMetricsServiceRequest
    metrics = {
        metric.name: metric
        for body in bodies
        for resource in request.FromString(body).resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }
    assert [point.as_double or point.as_int for point in metrics["accel_nb.samples"].sum.data_points] == [64]
    assert metrics["accel_nb.samples"].sum.is_monotonic
    assert metrics["accel_nb.step_time"].histogram.data_points[0].sum == 0.5
    [loss] = metrics["accel_nb.loss"].gauge.data_points
    assert loss.as_double == 0.4
    assert metrics["accel_nb.step"].gauge.data_points[0].as_int == 8
    attributes = {
        item.key: item.value.string_value for item in metrics["accel_nb.loss"].gauge.data_points[0].attributes
    }
    assert attributes == {"rank": "1"}
    assert len(metrics["accel_nb.memory"].gauge.data_points) == 6
    assert metrics["accel_nb.checkpoint"].gauge.data_points[0].as_int == 99


def test_a_collector_that_is_not_there_holds_nothing_up() -> None:
    exporters = Exporters()
    exporters.use(MetricsOptions(otlp="http://127.0.0.1:9/v1/metrics"))
    started = time.monotonic()
    for step in range(100):
        exporters.export([StepDone(0, step, 1.0, 0.5, 0.01, 0.25, 32)])
    assert time.monotonic() - started < 1.0
    exporters.close()
    assert time.monotonic() - started < 15.0
