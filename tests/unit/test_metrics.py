"""Metrics for monitoring systems: read back through each system's own protocol, by its parser where there is one."""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from accel_nb.config.sections import MetricsOptions
from accel_nb.errors import ConfigError
from accel_nb.telemetry.events import (
    CheckpointSaved,
    DeviceLoad,
    Event,
    Interrupted,
    MemorySample,
    MetricLogged,
    RankFailed,
    StepDone,
    TimeUsed,
    WorkerPrepared,
)
from accel_nb.telemetry.metrics import METRICS, Exporters, MetricValue, metric_values
from accel_nb.telemetry.metrics.metric_values import MAX_NAMES
from accel_nb.telemetry.metrics.statsd import MAX_DATAGRAM, datagrams, line

EVENTS: list[Event] = [
    WorkerPrepared(1, 0.0, "cpu", "ddp", "bf16", ("model",), ()),
    StepDone(0, 1, 1.0, 0.5, 0.01, 0.2, 32),
    StepDone(1, 1, 1.0, 0.7, 0.01, 0.02, 31),
    StepDone(1, 2, 2.0, 0.6, 0.01, 0.03, 31, skipped=True),
    StepDone(1, 3, 3.0, float("nan"), 0.01, 0.03, 32),
    MemorySample(0, 1, 1.0, 10, 20, 30, 40, 50, 60),
    DeviceLoad(0, 1, 1.0, "GPU power (W)", 310.5),
    TimeUsed(0, 1, 1.0, 0.5, 1.5, 0.25, 0.125),
    MetricLogged(0, 1, 1.0, "top-1, %", 0.25),
    RankFailed(1, 2.0, "died"),
    Interrupted(0, 3.0),
    CheckpointSaved(0, 3, 3.0, "/tmp/step_3", 0.1, 1.5, 2048),
]


@pytest.fixture
def exporters() -> Iterator[Exporters]:
    exporters = Exporters()
    yield exporters
    exporters.close()


def _families(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def _get(line: str) -> str:
    url = re.search(r"http://127\.0\.0\.1:\d+/metrics", line)
    assert url is not None
    with urllib.request.urlopen(url[0], timeout=10) as answer:
        return answer.read().decode()


def test_prometheus_reads_every_event_from_loopback_alone(exporters: Exporters) -> None:
    [line] = exporters.use(MetricsOptions(port=0))
    exporters.export(EVENTS[:5])
    exporters.export(EVENTS[5:])
    found = _families(_get(line))
    rank0, rank1 = (("rank", "0"),), (("rank", "1"),)
    assert found["accel_nb_steps_total", rank1] == 2
    assert found["accel_nb_skipped_steps_total", rank1] == 1
    assert found["accel_nb_samples_total", rank1] == 94
    assert found["accel_nb_step_time_seconds_count", rank1] == 3
    assert found["accel_nb_step_time_seconds_sum", rank0] == pytest.approx(0.2)
    assert found["accel_nb_step_time_seconds_bucket", (("le", "0.25"), *rank0)] == 1
    assert found["accel_nb_loss", rank0] == 0.5
    assert found["accel_nb_memory_bytes", (("kind", "optimizer"), *rank0)] == 30
    assert found["accel_nb_time_seconds_total", (("kind", "reading"), *rank0)] == 0.5
    assert found["accel_nb_logged", (("name", "top-1, %"), *rank0)] == 0.25
    assert found["accel_nb_checkpoint_bytes", ()] == 2048
    worker = (("device", "cpu"), ("precision", "bf16"), *rank1, ("strategy", "ddp"))
    assert found["accel_nb_worker", worker] == 1
    exported = {name for name, _ in found}
    for name, metric in METRICS.items():
        assert {"counter": f"{name}_total", "histogram": f"{name}_count"}.get(metric.kind, name) in exported, name
    listening = [c for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN]
    port = int(line.rpartition(":")[2].partition("/")[0])
    assert [item.laddr.ip for item in listening if item.laddr.port == port] == ["127.0.0.1"]
    assert exporters.use(MetricsOptions(port=0)) == []  # it stays open for the next run
    exporters.close()
    assert port not in [c.laddr.port for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN]


def test_a_textfile_is_whole_and_has_the_last_values(exporters: Exporters, tmp_path: Path) -> None:
    path = tmp_path / "new" / "accel_nb.prom"
    [line] = exporters.use(MetricsOptions(textfile=str(path)))
    assert line == f"metrics in {path}"
    for event in EVENTS:
        exporters.export([event])
    exporters.flush()
    found = _families(path.read_text())
    assert found["accel_nb_checkpoint_step", ()] == 3
    assert found["accel_nb_steps_total", (("rank", "1"),)] == 2
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("tagged", [True, False])
def test_statsd_gets_lines(exporters: Exporters, tagged: bool) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))
        server.settimeout(10)
        exporters.use(MetricsOptions(statsd=f"127.0.0.1:{server.getsockname()[1]}", statsd_tags=tagged))
        exporters.export(EVENTS)
        lines = server.recv(65536).decode().splitlines()
    if tagged:
        assert "accel_nb.steps:2|c|#rank:1" in lines
        assert "accel_nb.step_time:30|ms|#rank:1" in lines
        assert "accel_nb.memory_bytes:30|g|#rank:0,kind:optimizer" in lines
        assert "accel_nb.logged:0.25|g|#rank:0,name:top-1_ %" in lines
    else:
        assert "accel_nb.steps.rank1:2|c" in lines
        assert "accel_nb.memory_bytes.rank0.optimizer:30|g" in lines
        assert "accel_nb.logged.rank0.top-1___:0.25|g" in lines
    assert "accel_nb.checkpoints:1|c" in lines
    kinds = {line.partition(":")[0]: line.split("|")[1] for line in lines}
    assert len(kinds) == len({(line.partition(":")[0], line.split("|")[1]) for line in lines}), "one kind a name"
    assert not any("nan" in line for line in lines)


def test_a_gauge_below_zero_is_set_and_not_changed() -> None:
    sample = MetricValue("accel_nb_loss", ("0",), -1.5)
    assert line(sample, False) == "accel_nb.loss.rank0:0|g\naccel_nb.loss.rank0:-1.5|g"
    assert line(sample, True) == "accel_nb.loss:-1.5|g|#rank:0", "Datadog's agent has no such changes"


def test_lines_are_packed_into_packets_of_bounded_size() -> None:
    lines = [f"accel_nb.logged:{number}|g|#rank:0,name:{'x' * 40}" for number in range(200)]
    packets = datagrams(lines)
    assert max(map(len, packets)) <= MAX_DATAGRAM
    assert b"\n".join(packets).decode().splitlines() == lines
    assert len(packets) < 12


def test_names_are_bounded(exporters: Exporters, caplog: pytest.LogCaptureFixture) -> None:
    [line] = exporters.use(MetricsOptions(port=0))
    with caplog.at_level(logging.WARNING, logger="accel_nb"):
        for number in range(2 * MAX_NAMES):
            exporters.export([MetricLogged(0, number, 0.0, f"sample {number}", 1.0)])
    names = {labels for name, labels in _families(_get(line)) if name == "accel_nb_logged"}
    assert len(names) == MAX_NAMES
    assert len(caplog.records) == 1


def test_an_exporter_that_fails_is_reported_once_and_the_others_go_on(
    exporters: Exporters, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "gone"
    lines = exporters.use(MetricsOptions(port=0, textfile=str(folder / "a.prom")))
    folder.rmdir()
    with caplog.at_level(logging.WARNING, logger="accel_nb"):
        for event in EVENTS:
            exporters.export([event])
    exporters.flush()
    assert [record.message for record in caplog.records] == [
        f"metrics in {folder / 'a.prom'}: export failed and is switched off; the run continues"
    ]
    assert _families(_get(lines[0]))["accel_nb_checkpoint_step", ()] == 3


def test_an_exporter_that_fails_is_closed(exporters: Exporters) -> None:
    [line] = exporters.use(MetricsOptions(port=0))
    port = int(line.partition("127.0.0.1:")[2].partition("/")[0])
    exporters.export([TimeUsed(0, 1, 0.0, -1.0, 0.0, 0.0, 0.0)])  # a counter cannot decrease
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", port))


def test_a_textfile_is_in_the_folder_of_the_call(
    exporters: Exporters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    exporters.use(MetricsOptions(textfile="a.prom"))
    (tmp_path / "elsewhere").mkdir()
    os.chdir("elsewhere")
    exporters.flush()
    assert (tmp_path / "a.prom").exists()


def test_what_cannot_be_opened_is_named_and_nothing_stays_open(exporters: Exporters, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"metrics.port: {port} cannot be used .*use another value"):
            exporters.use(MetricsOptions(port=port))
    with pytest.raises(ConfigError, match=r"metrics\.statsd: a\.\.b:8125 cannot be used"):
        exporters.use(MetricsOptions(statsd="a..b:8125"))
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"metrics\.textfile: .* cannot be used"):
        exporters.use(MetricsOptions(port=0, textfile=str(tmp_path / "file" / "a.prom")))
    exporters.export(EVENTS)
    assert exporters.use(MetricsOptions()) == []


def test_the_dashboard_asks_for_what_is_exported(project: Path) -> None:
    """Every metric in every query is one that Prometheus gets, with the labels that the query names."""
    endings = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
    served = {base + end: metric for base, metric in METRICS.items() for end in endings[metric.kind]}
    dashboard: dict[str, Any] = json.loads((project / "docs/grafana/accel_nb.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [item["query"] for item in dashboard["templating"]["list"] if item["type"] == "query"]
    asked: set[str] = set()
    for query in queries:
        names = re.findall(r"\baccel_nb_\w+", query)
        assert names, query
        for name in names:
            assert name in served, f"{name} in {query} is not exported"
            asked.add(name.removesuffix("_total").removesuffix("_bucket"))
            labels = {*served[name].labels, "le"}
            for group in re.findall(r"by \(([^)]*)\)", query):
                assert {part.strip() for part in group.split(",")} <= labels, query
        for name, selector in re.findall(r"(accel_nb_\w+)\{([^}]*)\}", query):
            assert set(re.findall(r"(\w+)\s*[=!]", selector)) <= set(served[name].labels), query
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            [name, *_] = re.findall(r"\baccel_nb_\w+", target["expr"])
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= set(served[name].labels)
    assert not set(METRICS) - asked - {"accel_nb_steps", "accel_nb_checkpoints", "accel_nb_checkpoint_bytes"}


def test_each_event_says_something() -> None:
    names = {sample.name for event in EVENTS for sample in metric_values(event)}
    assert names == set(METRICS)
