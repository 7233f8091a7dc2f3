"""The order of a rank's output and messages."""

from __future__ import annotations

from accel_nb.pool.local.ordered_text import OrderedText


def mark(number: int) -> bytes:
    return b"\x00accel_nb %08x\x00" % number


def test_text_after_a_mark_is_held_until_its_note_is_read():
    text = OrderedText()
    assert text.add(b"a" + mark(1) + b"b" + mark(2) + b"c") == b"a"
    assert text.add(b"d") == b""
    assert text.record_message(1) == b"b"
    assert text.record_message(2) == b"cd"
    assert text.add(b"e") == b"e"


def test_a_note_that_is_read_before_its_mark_holds_nothing():
    text = OrderedText()
    assert text.record_message(2) == b""
    assert text.add(b"a" + mark(1) + mark(2) + b"b") == b"ab"


def test_what_is_held_at_the_end_is_returned_without_marks():
    text = OrderedText()
    assert text.add(mark(1) + b"a" + mark(2) + b"b\x00c") == b""
    assert text.finish() == b"ab\x00c"
    assert text.finish() == b""
