"""The text that a cell shows of its ranks, and the message at its end."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from dataclasses import replace

import pytest

from accel_nb.notebook.messages import RankAnswer
from accel_nb.notebook.output.cell_output import MAX_SHOWN_BYTES, CellOutput
from accel_nb.notebook.output.rank_logs import RankLog
from accel_nb.notebook.session.error_translation import error_from_answers
from accel_nb.pool.control.stop_escalation import WorkerDeath
from accel_nb.pool.engine import WorkerSpec
from accel_nb.pool.pool import HANG
from accel_nb.telemetry.events import MetricLogged, WorkerPrepared, to_message
from accel_nb.ui.panel import Panel


def shown(pieces: list[tuple[int, bytes]], ranks: set[int]) -> str:
    """Return what is printed when ranks write ``pieces`` in turn."""
    written = io.StringIO()
    with redirect_stdout(written):
        output = CellOutput(
            [WorkerSpec("cpu", 1)] * 2, panel=Panel("cell", 2, mode="off"), shown_ranks=ranks, is_new=False
        )
        output._receipt_text = output._starting_text  # no receipt among the text
        output._update_receipt = lambda: None  # type: ignore[method-assign]
        output._hidden_rank_lines = list  # type: ignore[method-assign]
        for rank, data in pieces:
            output.on_output(rank, "stdout", data)
        output.finish("done", [])
    return written.getvalue()


def test_lines_of_ranks_are_not_mixed():
    pieces = [(0, b"one "), (1, b"other\nlast"), (0, b"line\n"), (0, b"50%\r"), (0, b"99%\r\n")]
    text = shown(pieces, {0, 1})
    assert text == "[rank 1] other\n[rank 0] one line\n[rank 0] 50%\r[rank 0] 99%\r\n[rank 1] last\n"


def test_the_text_of_a_single_shown_rank_is_unchanged():
    assert shown([(0, b"no "), (1, b"hidden\n"), (0, b"prefix")], {0}) == "no prefix"


def test_an_incomplete_character_is_shown_at_the_end():
    assert shown([(0, "\N{EURO SIGN}".encode()[:2]), (0, b"")], {0}) == "\\xe2\\x82"
    assert shown([(0, "\N{EURO SIGN}".encode()[:2]), (0, "\N{EURO SIGN}".encode()[2:])], {0}) == "\N{EURO SIGN}"


def test_what_is_not_shown_is_counted_for_each_rank():
    line = b"x" * 99 + b"\n"
    pieces = [(0, line * (MAX_SHOWN_BYTES // 100 + 1)), (0, b"more of it\n"), (1, b"five\n")]
    text = shown(pieces, {0, 1})
    assert "[... 11 more bytes of rank 0; `%accelerate logs 0` shows them." in text
    assert "[... 5 more bytes of rank 1; `%accelerate logs 1` shows them." in text
    assert "[... 11 more bytes; `%accelerate logs 0` shows them." in shown(pieces, {0})


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


PREPARED = to_message(WorkerPrepared(0, 0.0, "cpu", "single", "no", (), ()))


@pytest.mark.parametrize(("topic", "body"), [("event", PREPARED), (HANG, {"line": "rank 0 waits"})])
def test_a_terminals_line_makes_room_for_the_receipt_and_for_lines(topic, body):
    with redirect_stdout(Terminal()) as written:
        panel = Panel("cell", 1, display="text")
        output = CellOutput([WorkerSpec("cpu", 1)], panel=panel, shown_ranks={0}, is_new=True)
        output.on_events([MetricLogged(0, step, 0.1 * step, "loss", 1.0) for step in range(8)])
        panel.refresh(force=True)
        before = written.getvalue()
        output.on_message(0, topic, body)
    assert before.endswith("loss 1")
    assert written.getvalue().removeprefix(before).startswith("\r\x1b[K{")


DEAD = RankAnswer(1, "died", death=WorkerDeath(-9, is_killed=False))
ENDED = RankAnswer(1, "died", death=WorkerDeath(-9, is_killed=True, stack="in slow\n"))

EXITED = RankAnswer(0, "died", death=WorkerDeath(1, is_killed=False))


@pytest.mark.parametrize(
    ("answers", "reason", "has_pool", "part"),
    [
        ([DEAD], "death", True, "A fresh worker takes its place; the next cell starts with the notebook's values"),
        ([DEAD], "death", False, "has ended too; both are started again. The next cell starts"),
        ([ENDED], "timeout", True, "timeout of 3 s: rank 1 did not stop and was ended"),
        ([ENDED], "timeout", True, "The last Python stack of rank 1:\nin slow"),
        ([replace(DEAD, rank=0), ENDED], "death", True, "stack of rank 1:\nin slow"),
        ([EXITED, replace(EXITED, rank=1)], "death", True, "exited with code 1 while the cell ran, rank 1 too. Fresh"),
        ([EXITED, DEAD], "death", True, "rank 0 exited with code 1 while the cell ran; rank 1 was ended by SIGKILL"),
        ([EXITED, ENDED], "death", True, "while the cell ran; rank 1 then did not stop and was ended. Fresh workers"),
        ([replace(ENDED, rank=0), ENDED], "timeout", True, "3 s: ranks 0 and 1 did not stop and were ended; the next"),
        ([RankAnswer(0, "interrupted")], "timeout", True, "timeout of 3 s: stopped on every rank"),
    ],
)
def test_the_message_says_what_was_kept(answers, reason, has_pool, part):
    error = error_from_answers(answers, reason, {1: RankLog()}, 3.0, has_pool=has_pool)
    assert part in str(error)
