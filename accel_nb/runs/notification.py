"""Notifications of the end of a run: a POST request or a call of a program."""

from __future__ import annotations

import json
import logging
import math
import shlex
import subprocess
import threading
import urllib.request
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from http.client import HTTPException

from accel_nb.config.sections import NotifyOptions
from accel_nb.runs.record import Outcome
from accel_nb.runtime.process.secrets import redact

logger = logging.getLogger(__name__)

TIMEOUT_S = 10.0
_MAX_METRICS = 4
_MAX_ERROR = 300


@dataclass(frozen=True, slots=True)
class RunEnd:
    """The end of a run, for notifications and records."""

    name: str
    outcome: Outcome
    duration_s: float
    num_steps: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None

    @property
    def text(self) -> str:
        """The name, outcome and results as one line, without secrets."""
        parts = [f"{self.name} {self.outcome} after {_format_duration(self.duration_s)}"]
        if self.num_steps:
            parts.append(f"{self.num_steps:,} steps")
        parts += [f"{name} {value:.4g}" for name, value in list(self.metrics.items())[:_MAX_METRICS]]
        if self.error:
            parts.append(self.error.splitlines()[0][:_MAX_ERROR])
        return redact(", ".join(parts))

    def to_json(self) -> str:
        """Return the JSON object that is sent; values that are not finite are strings."""
        metrics = {name: value if math.isfinite(value) else str(value) for name, value in self.metrics.items()}
        error = None if self.error is None else redact(self.error)
        facts = asdict(self) | {"metrics": metrics, "error": error}
        return json.dumps({"text": self.text, "content": self.text, **facts})


def notify(end: RunEnd, options: NotifyOptions) -> threading.Thread | None:
    """Send the notifications that the options name, in a thread; return it, or None if there is nothing to send.

    A failed notification is logged. Notifications neither delay a run nor make it fail.
    """
    if end.duration_s < options.after or (options.url is None and options.command is None):
        return None
    sender = threading.Thread(target=_send, args=(end, options), name="accel_nb notification", daemon=True)
    sender.start()
    return sender


def _send(end: RunEnd, options: NotifyOptions) -> None:
    if options.url is not None:
        request = urllib.request.Request(
            options.url, end.to_json().encode(), {"Content-Type": "application/json", "User-Agent": "accel_nb"}
        )
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S):
                pass
        except (OSError, ValueError, HTTPException) as error:  # URLError is an OSError; the URL may hold a token
            logger.warning("notify.url: the notification was not sent: %s", redact(str(error)))
    if options.command is not None:
        try:
            words = shlex.split(options.command)
            done = subprocess.run(
                [*words, end.text], input=end.to_json(), text=True, capture_output=True, timeout=TIMEOUT_S, check=False
            )
            if done.returncode:
                problem = redact(done.stderr.strip()[-_MAX_ERROR:])
                logger.warning("notify.command: %s ended with status %d: %s", words[0], done.returncode, problem)
        except (OSError, ValueError, IndexError, subprocess.TimeoutExpired) as error:
            logger.warning("notify.command: the program was not run: %s", redact(str(error)))


def _format_duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
