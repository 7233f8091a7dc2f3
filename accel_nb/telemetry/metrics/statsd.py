"""Export of metrics to StatsD: lines over UDP, plain or with Datadog's tags."""

from __future__ import annotations

import socket
from collections.abc import Iterable

from accel_nb.telemetry.metrics.samples import METRICS, Sample

MAX_DATAGRAM = 1432
"""Maximum number of bytes in a packet, so that it fits into one Ethernet frame."""
_RESERVED = str.maketrans(dict.fromkeys(":|@#,\n\r", "_"))
_TYPES = {"counter": "c", "gauge": "g"}


def line(sample: Sample, tagged: bool) -> str:
    """Return the line of a sample; if it is not ``tagged``, the labels are parts of the name."""
    metric = METRICS[sample.name]
    name, value = "accel_nb." + sample.name.removeprefix("accel_nb_"), sample.value
    kind = _TYPES.get(metric.kind, "ms")
    if kind == "ms":
        name, value = name.removesuffix("_seconds"), value * 1000
    labels = dict(zip(metric.labels, (label.translate(_RESERVED) for label in sample.labels), strict=True))
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
    """Sends samples to ``HOST:PORT``; packets that cannot be sent are dropped, as usual with UDP."""

    def __init__(self, address: str, *, tagged: bool) -> None:
        """Resolve the host once; raises OSError for an unknown host."""
        host, _, port = address.rpartition(":")
        family, kind, protocol, _, self._address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_DGRAM)[0]
        self._name, self._tagged = address, tagged
        self._socket = socket.socket(family, kind, protocol)
        self._socket.setblocking(False)

    def export(self, samples: Iterable[Sample]) -> None:
        """Send samples: only the newest of each gauge, the sum of each counter, and all of a histogram."""
        merged: dict[tuple[str, ...], Sample] = {}
        histograms: list[Sample] = []
        for sample in samples:
            kind, key = METRICS[sample.name].kind, (sample.name, *sample.labels)
            if kind == "histogram":
                histograms.append(sample)
            elif kind == "counter" and key in merged:
                merged[key] = Sample(sample.name, sample.labels, merged[key].value + sample.value)
            else:
                merged[key] = sample
        finite = (sample for sample in [*merged.values(), *histograms] if abs(sample.value) < float("inf"))
        for packet in datagrams(line(sample, self._tagged) for sample in finite):
            try:
                self._socket.sendto(packet, self._address)
            except (BlockingIOError, ConnectionRefusedError):
                continue

    def flush(self) -> None:
        """Do nothing: `export` sends samples at once."""

    def describe(self) -> str:
        """Return the destination of the metrics."""
        return f"metrics to {self._name} by {'DogStatsD' if self._tagged else 'StatsD'}"

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


def _escape_label(label: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in label)
