"""Export of metrics to StatsD: lines over UDP, plain or with Datadog's tags."""

from __future__ import annotations

import socket
from collections.abc import Iterable

from accel_nb.telemetry.metrics.metric_values import METRICS, MetricValue

MAX_DATAGRAM = 1432
"""Maximum number of bytes in a packet, so that it fits into one Ethernet frame."""
_RESERVED = str.maketrans(dict.fromkeys(":|@#,\n\r", "_"))
_TYPES = {"counter": "c", "gauge": "g"}


def line(entry: MetricValue, tagged: bool) -> str:
    """Return the line of a metric value; if it is not ``tagged``, the labels are parts of the name."""
    metric = METRICS[entry.name]
    name, value = "accel_nb." + entry.name.removeprefix("accel_nb_"), entry.value
    kind = _TYPES.get(metric.kind, "ms")
    if kind == "ms":
        name, value = name.removesuffix("_seconds"), value * 1000
    labels = dict(zip(metric.labels, (label.translate(_RESERVED) for label in entry.labels), strict=True))
    if tagged:
        tags = ",".join(f"{key}:{label}" for key, label in labels.items())
        return f"{name}:{value:.10g}|{kind}" + (f"|#{tags}" if tags else "")
    parts = [name, *(f"rank{label}" if key == "rank" else _escape_label(label) for key, label in labels.items())]
    path = ".".join(parts)
    if kind == "g" and value < 0:  # a sign makes it a change of the gauge
        return f"{path}:0|g\n{path}:{value:.10g}|g"
    return f"{path}:{value:.10g}|{kind}"


def datagrams(lines: Iterable[str]) -> list[bytes]:
    """Join successive lines into packets of at most `MAX_DATAGRAM` bytes."""
    packets: list[bytes] = []
    for text in lines:
        data = text.encode()
        if packets and len(packets[-1]) + 1 + len(data) <= MAX_DATAGRAM:
            packets[-1] += b"\n" + data
        else:
            packets.append(data)
    return packets


class Statsd:
    """Sends values to ``HOST:PORT``; packets that cannot be sent are dropped, as usual with UDP."""

    def __init__(self, address: str, *, tagged: bool) -> None:
        """Resolve the host once; raises OSError for an unknown host."""
        host, _, port = address.rpartition(":")
        family, kind, protocol, _, self._address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_DGRAM)[0]
        self._name, self._tagged = address, tagged
        self._socket = socket.socket(family, kind, protocol)
        self._socket.setblocking(False)

    def export(self, values: Iterable[MetricValue]) -> None:
        """Send values: only the newest of each gauge, the sum of each counter, and all of a histogram."""
        merged: dict[tuple[str, ...], MetricValue] = {}
        histograms: list[MetricValue] = []
        for entry in values:
            kind, key = METRICS[entry.name].kind, (entry.name, *entry.labels)
            if kind == "histogram":
                histograms.append(entry)
            elif kind == "counter" and key in merged:
                merged[key] = MetricValue(entry.name, entry.labels, merged[key].value + entry.value)
            else:
                merged[key] = entry
        finite = (entry for entry in [*merged.values(), *histograms] if abs(entry.value) < float("inf"))
        for packet in datagrams(line(entry, self._tagged) for entry in finite):
            try:
                self._socket.sendto(packet, self._address)
            except (BlockingIOError, ConnectionRefusedError):
                continue

    def flush(self) -> None:
        """Do nothing: `export` sends values at once."""

    def describe(self) -> str:
        """Return the destination of the metrics."""
        return f"metrics to {self._name} by {'DogStatsD' if self._tagged else 'StatsD'}"

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


def _escape_label(label: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in label)
