"""The order of a rank's output and messages."""

from __future__ import annotations

import pytest

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


@pytest.mark.parametrize("place", range(1, len(mark(1))))
def test_a_mark_that_arrives_in_two_parts_is_a_mark(place):
    text = OrderedText()
    data = b"a" + mark(1)
    assert text.add(data[: place + 1]) == b"a"
    assert text.add(data[place + 1 :] + b"b") == b""
    assert text.record_message(1) == b"b"


def test_text_that_only_resembles_the_start_of_a_mark_is_returned():
    text = OrderedText()
    assert text.add(b"a\x00accel_nb 12") == b"a"
    assert text.add(b"x\x00b") == b"\x00accel_nb 12x\x00b"
    assert text.add(b"\x00accel_nb 123456789") == b"\x00accel_nb 123456789"
    assert text.add(b"\x00") == b""
    assert text.finish() == b"\x00"
