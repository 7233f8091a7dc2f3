"""The output of one running cell: receipt, panel, text and displays of the shown ranks, a line for the others."""

from __future__ import annotations

import re
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

from IPython.core.getipython import get_ipython
from IPython.display import DisplayHandle, display

from accel_nb.notebook.messages import read_answer
from accel_nb.notebook.output import widget_messages
from accel_nb.notebook.output.log_records import RECORD, handle_record
from accel_nb.notebook.output.rank_logs import Decoder, RankLog
from accel_nb.notebook.output.receipt import display_bundle, receipt_line, starting_line, workers_text
from accel_nb.pool.control.stop_escalation import RankResult
from accel_nb.pool.engine import WorkerSpec
from accel_nb.pool.pool import HANG
from accel_nb.runtime.process.secrets import redact
from accel_nb.telemetry.events import Event, Interrupted, MemorySample, RankFailed, WorkerPrepared, from_message
from accel_nb.ui.messages import PanelFacts
from accel_nb.ui.panel import Panel
from accel_nb.ui.view import PanelState

FLUSH_S = 0.03
IMPORTING, STARTING, SENDING = "importing torch", "starting workers", "sending values"
RUNNING, FIRST_STEP = "running", "waiting for the first step"
"""Phases of a cell until its first step or output, which the receipt shows."""
PHASE_DELAY_S = 1.0
"""How long a cell may run before its phase is shown, and the time between two updates of it, in seconds."""
RECEIPT_DELAY_S = 0.04
"""How long a cell may run before its receipt is shown, in seconds."""
MAX_SHOWN_BYTES = 1024 * 1024
"""After this many bytes of a cell, text is only logged; its last lines are shown when the cell ends."""
MAX_STORED_DISPLAYS = 32
"""How many rich outputs are stored for `%accelerate attach`."""
_NUMBER = re.compile(r"-?\d[\d.,:]*(?:e[-+]?\d+)?(?: ?[nuµμm]?s\b)?")
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")


class CellOutput:
    """A pool listener that shows a cell's output in the notebook."""

    _all_lines_hint = "`%accelerate logs {}`"

    def __init__(
        self,
        specs: Sequence[WorkerSpec],
        *,
        panel: Panel,
        shown_ranks: Collection[int],
        is_new: bool,
        prefix: Callable[[int], str] | None = None,
        is_same_on_ranks: bool = False,
    ) -> None:
        """``is_same_on_ranks``: whether ranks print the same text except times, process numbers and the like."""
        self._specs = specs
        self._has_prefix = prefix is not None or len(shown_ranks) > 1
        self._prefix = prefix or "[rank {}] ".format
        self._panel = panel
        self._shown_ranks = set(shown_ranks)
        self._is_same_on_ranks = is_same_on_ranks
        self._reports: dict[int, WorkerPrepared] = {}
        self._decoders: dict[tuple[int, str], Decoder] = {}
        self._waiting: list[tuple[str, str]] = []
        self._flushed_at = 0.0
        self._num_shown = 0
        self._bytes_shown: dict[int, int] = {}
        self._unfinished: dict[tuple[int, str], str] = {}
        self._displays: deque[tuple[str, dict[str, Any]]] = deque(maxlen=MAX_STORED_DISPLAYS)
        self._last_lines: list[str] = []
        self.logs = {rank: RankLog() for rank in range(len(specs))}
        # Compared where ranks do the same; the other stream has progress bars, whose text depends on the time.
        self._stdout = {rank: RankLog() for rank in range(len(specs))}
        self.memory: dict[int, MemorySample] = {}
        """The last memory sample of each rank."""
        self._receipt = DisplayHandle()
        self._receipt_text: str | None = None
        self._starting_text = starting_line(specs, is_new=is_new)
        self._started = self._phase_since = self._phase_shown_at = time.monotonic()
        self._phase: str | None = RUNNING
        if is_new:
            self._ensure_receipt()

    @property
    def panel_state(self) -> PanelState:
        """The panel's state."""
        return self._panel.state

    def panel_facts(self) -> PanelFacts:
        """Return the run's figures, in any thread."""
        return self._panel.facts()

    def set_phase(self, phase: str) -> None:
        """Show what the cell waits for and for how long, except in the cell's first second."""
        if phase != self._phase:
            self._phase, self._phase_since = phase, time.monotonic()
        self._show_phase()

    def on_output(self, rank: int, stream: str, data: bytes) -> None:
        """Log a rank's output, and show it if the rank is among the shown ones."""
        self.logs[rank].write(data)
        if stream == "stdout" and self._is_same_on_ranks:
            self._stdout[rank].write(data)
        if rank not in self._shown_ranks or self._num_shown > MAX_SHOWN_BYTES:
            return
        self._ensure_receipt()
        self._end_phases()
        self._num_shown += len(data)
        self._bytes_shown[rank] = self._bytes_shown.get(rank, 0) + len(data)
        self._write(rank, stream, self._decoders.setdefault((rank, stream), Decoder()).decode(data))
        if time.monotonic() - self._flushed_at > FLUSH_S:
            self._flush()

    def on_message(self, rank: int, topic: str, body: dict[str, Any]) -> None:
        """Show a rank's rich output, handle a log record, or process an event."""
        if topic == HANG:
            self._ensure_receipt()
            self._flush()
            self._show_line(body["line"])
        elif topic == "event":
            self._process_event(from_message(body))
        elif topic == RECORD or rank in self._shown_ranks:
            self._ensure_receipt()
            self._end_phases()
            self._flush()
            if topic == RECORD:
                self._panel.prepare_for_text()
                handle_record(body)
                return
            if topic in widget_messages.TOPICS:
                widget_messages.apply_message(topic, body)
                return
            self._displays.append((topic, body))
            self._show(topic, body)

    def on_events(self, events: Sequence[Event]) -> None:
        """Update the panel with measurements."""
        self._ensure_receipt()
        self.memory |= {event.rank: event for event in events if isinstance(event, MemorySample)}
        self._panel.feed(events)
        if self._panel.state.has_data:
            self._end_phases()

    def on_result(self, answer: RankResult) -> None:
        """Update the panel with the outcome of a rank."""
        now = time.time()
        if answer.outcome in ("raised", "died"):
            error = read_answer(answer).reply.error
            reason = "it died" if error is None else f"{error.type}: {redact(error.message)}".rstrip(": ")
            self._panel.feed([RankFailed(answer.rank, now, reason)])
        elif answer.outcome == "interrupted":
            self._panel.feed([Interrupted(answer.rank, now)])

    def tick(self) -> None:
        """Flush waiting text and refresh the panel."""
        if time.monotonic() - self._started > RECEIPT_DELAY_S:
            self._ensure_receipt()
        if self._phase is not None:
            is_training = any(report.objects for report in self._reports.values())
            self.set_phase(FIRST_STEP if is_training else RUNNING)
        self._flush()
        self._panel.refresh()

    def finish(self, status: str, lines: Sequence[str]) -> None:
        """Complete the output: the rest of the text, the receipt, the panel's final picture, and ``lines``."""
        for (rank, stream), decoder in self._decoders.items():
            self._write(rank, stream, decoder.finish(), is_last=True)
        self._flush()
        self._phase = None
        self._update_receipt()
        for rank in sorted(self._shown_ranks):
            hidden = self.logs[rank].num_bytes - self._bytes_shown.get(rank, 0)
            if hidden:
                of_rank = f" of rank {rank}" if len(self._shown_ranks) > 1 else ""
                head = f"\n[... {hidden:,} more bytes{of_rank}; `%accelerate logs {rank}` shows them. The end:]\n"
                print(head + self.logs[rank].end_of_text())
        self._panel.finish(status)  # type: ignore[arg-type]
        self._last_lines = [*self._hidden_rank_lines(), *lines]
        for line in self._last_lines:
            self._show_line(line)

    def show_again(self) -> None:
        """Show the output so far again, in the running cell."""
        self._flush()
        text, self._receipt_text = self._receipt_text or self._starting_text, None
        self._receipt = DisplayHandle()
        self._show_receipt(text)
        for rank in sorted(self._shown_ranks):
            shown = self.logs[rank].text()
            if self._has_prefix:
                lines = _LINE.findall(shown)
                if any(other == rank for other, _ in self._unfinished):
                    lines.pop()  # an incomplete line is shown when it is complete
                shown = "".join(self._prefix(rank) + line for line in lines)
            if shown:
                print(shown, end="")
        for topic, body in self._displays:
            self._show(topic, {**body, "transient": {}, "update": False})
        self._panel.attach()
        for line in self._last_lines:
            self._show_line(line)

    def _process_event(self, event: Event) -> None:
        self._panel.feed([event])
        if isinstance(event, WorkerPrepared):
            self._reports[event.rank] = event
            if len(self._reports) == len(self._specs):
                self._update_receipt()

    def _ensure_receipt(self) -> None:
        """Show the receipt once, above all other output. A cell that ends earlier shows its final receipt only."""
        if self._receipt_text is None:
            self._show_receipt(self._starting_text)

    def _update_receipt(self) -> None:
        self._show_receipt(receipt_line(self._specs, list(self._reports.values())))

    def _show_phase(self) -> None:
        if getattr(get_ipython(), "kernel", None) is None:
            return  # a terminal cannot replace a display
        now = time.monotonic()
        if self._phase is None or min(now - self._started, now - self._phase_shown_at) < PHASE_DELAY_S:
            return
        self._phase_shown_at = now
        self._show_receipt(f"{self._receipt_base()} · {self._phase}, {now - self._phase_since:.0f} s")

    def _end_phases(self) -> None:
        """Remove the phase from the receipt: the cell has ended a step or written output."""
        if self._phase is not None:
            self._phase = None
            if self._receipt_text != self._starting_text:
                self._show_receipt(self._receipt_base())

    def _receipt_base(self) -> str:
        has_all = len(self._reports) == len(self._specs)
        return receipt_line(self._specs, list(self._reports.values())) if has_all else workers_text(self._specs)

    def _show_receipt(self, text: str) -> None:
        """Show or replace the receipt. Skip an unchanged one, since each message flushes the kernel's streams."""
        if text == self._receipt_text:
            return
        show = self._receipt.display if self._receipt_text is None else self._receipt.update
        self._receipt_text = text
        self._panel.prepare_for_text()
        show(display_bundle(redact(text)), raw=True)

    def _show_line(self, line: str) -> None:
        self._panel.prepare_for_text()
        display(display_bundle(redact(line)), raw=True)

    def _show(self, topic: str, body: dict[str, Any]) -> None:
        shell = get_ipython()
        assert shell is not None, "a cell runs in a shell"
        publisher = shell.display_pub
        self._panel.prepare_for_text()
        if topic == "clear":
            publisher.clear_output(wait=bool(body.get("wait")))
            return
        publisher.publish(
            body["data"],
            body["metadata"],
            transient=body.get("transient") or {},
            update=bool(body.get("update", False)),
        )

    def _write(self, rank: int, stream: str, text: str, *, is_last: bool = False) -> None:
        """Queue text to be shown. If lines have prefixes, only complete lines are queued."""
        if self._has_prefix:
            lines = _LINE.findall(self._unfinished.pop((rank, stream), "") + text)
            if lines and not is_last and not lines[-1].endswith(("\r", "\n")):
                self._unfinished[rank, stream] = lines.pop()
            text = "".join(self._prefix(rank) + line for line in lines)
            if is_last and text and not text.endswith("\n"):
                text += "\n"
        if text:
            self._waiting.append((stream, text))

    def _flush(self) -> None:
        self._flushed_at = time.monotonic()
        waiting, self._waiting = self._waiting, []
        if waiting:
            self._panel.prepare_for_text()
        for stream, text in waiting:
            (sys.stdout if stream == "stdout" else sys.stderr).write(text)
            self._panel.add_text(text)
        if waiting:
            sys.stdout.flush()
            sys.stderr.flush()

    def _hidden_rank_lines(self) -> list[str]:
        """Return a line for each rank whose text is not shown, unless a shown rank printed the same."""
        shown = [self._compared_text(rank) for rank in self._shown_ranks]
        hidden = [
            f"rank {rank} printed {log.num_lines} line{'s' * (log.num_lines != 1)}: {self._all_lines_hint.format(rank)}"
            for rank, log in self.logs.items()
            if rank not in self._shown_ranks and log.num_bytes and self._compared_text(rank) not in shown
        ]
        return hidden[:4] + ([f"and {len(hidden) - 4} more ranks"] if len(hidden) > 4 else [])

    def _compared_text(self, rank: int) -> str:
        """Return all text, or if ranks do the same, standard output without numbers: each measures its own times."""
        if not self._is_same_on_ranks:
            return self.logs[rank].text()
        return _NUMBER.sub("0", self._stdout[rank].text())


class ConsoleOutput(CellOutput):
    """The output of a launch outside a notebook: ranks' text unchanged, receipt and notes on stderr."""

    _all_lines_hint = "log_line_prefix_template shows every rank's"

    def _ensure_receipt(self) -> None:
        """Show no receipt before the workers have reported."""

    def _show_phase(self) -> None:
        """Show no phase, since a printed line cannot be replaced."""

    def _show_receipt(self, text: str) -> None:
        if self._reports and text != self._receipt_text:
            self._receipt_text = text
            self._show_line(text)

    def _show_line(self, line: str) -> None:
        print(redact(line), file=sys.stderr)

    def _show(self, topic: str, body: dict[str, Any]) -> None:
        if topic != "clear" and (text := body["data"].get("text/plain")):
            print(text)


def make_output(specs: Sequence[WorkerSpec], **options: Any) -> CellOutput:
    """Return an output for the notebook, or for the console outside a notebook."""
    return (ConsoleOutput if get_ipython() is None else CellOutput)(specs, **options)
