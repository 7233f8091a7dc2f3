import math

import numpy as np
import pytest

from accel_nb.ui.series_table import KEPT_RAW, MAX_ROWS, RowLimit, Table, extreme_rows


def filled(values, max_rows: int = MAX_ROWS) -> Table:
    table = Table(2, row_limit=RowLimit(max_rows=max_rows))
    for x, value in enumerate(values):
        table.append((x, value))
    return table


def test_rows_since_gives_what_a_reader_lacks():
    table = filled([5.0, 6.0, 7.0])
    assert [list(column) for column in table.rows_since(1) or []] == [[1, 2], [6, 7]]
    assert [list(column) for column in table.rows_since(3) or []] == [[], []]


def test_rows_since_picks_the_extremes_of_more_rows_than_a_reader_takes():
    table = filled([float(x % 7) for x in range(1000)])
    table.append((1000, 99.0))
    table.append((1001, -99.0))
    xs, values = table.rows_since(100, 64) or []
    assert 2 <= len(xs) <= 64 + 1
    assert (np.diff(xs) > 0).all()
    assert xs[0] >= 100
    assert {99.0, -99.0} <= set(values)


def test_picked_rows_end_with_the_last_one_which_is_read():
    table = filled([5.0, -5.0, *(x % 2 for x in range(998)), 0.5, 0.25])
    for xs, values in (table.downsampled(64), table.rows_since(0, 64) or [], table.downsampled(2)):
        assert (xs[-1], values[-1]) == (1001, 0.25)
        assert len(xs) <= 64 + 1


def test_a_part_is_picked_by_its_places():
    table = filled([float(x) for x in range(1000)])
    assert table.downsampled_between(10, 12.5, 64).tolist() == [[10, 11, 12], [10, 11, 12]]
    assert table.downsampled_between(2000, 3000, 64).shape == (2, 0)
    assert table.downsampled_between(0, 999, 64).shape[1] <= 64 + 1


def test_thinning_keeps_extremes_the_newest_rows_and_readers_that_keep_up():
    table = filled([float(x % 7) for x in range(20_000)], max_rows=20_000)
    table.append((20_000, 1.0))
    for x in range(20_001, 20_100):
        table.append((x, 99.0 if x == 20_050 else 1.0))
    assert len(table) < 15_000
    assert table.total == 20_100
    assert max(table.columns[1]) == 99.0
    assert min(table.columns[1]) == 0.0
    xs = np.array(table.columns[0])
    assert (np.diff(xs) > 0).all()
    recent = table.rows_since(20_100 - 1000)
    assert recent is not None
    assert list(recent[0]) == list(range(19_100, 20_100))
    assert table.rows_since(0) is None, "a reader that lags gets a snapshot"
    assert table.rows_since(20_001 - KEPT_RAW) is not None


def test_tables_hold_together_what_there_is_room_for():
    room = RowLimit(max_bytes=4 * 8 * 10_000)
    first = Table(2, row_limit=room)
    for x in range(20_000):
        first.append((x, math.sin(x)))
    assert len(first) > 10_000
    second = Table(2, row_limit=room)
    for x in range(20_000, 60_000):
        first.append((x, math.sin(x)))
        second.append((x, math.sin(x)))
    assert len(first) + len(second) <= 20_000
    assert list(first.columns[0])[-2000:] == list(range(58_000, 60_000)), "the newest rows are whole"


def test_a_table_stays_bounded():
    table = filled((math.sin(x) for x in range(60_000)), max_rows=10_000)
    assert len(table) <= 10_000
    assert table.total == 60_000


@pytest.mark.parametrize("num_rows", [1, 63, 64, 1000, 99_999])
def test_picked_rows_are_few_ordered_and_hold_the_spike(num_rows: int):
    values = np.sin(np.arange(num_rows))
    values[num_rows // 2] = 1e6
    downsampled = filled(values).downsampled(64)
    assert downsampled.shape[0] == 2
    assert downsampled.shape[1] <= 64 + 1, "the last row beside the extremes"
    assert (np.diff(downsampled[0]) > 0).all()
    assert 1e6 in downsampled[1]


def test_extreme_rows_ignores_what_is_not_finite_and_keeps_a_row_of_an_empty_block():
    values = np.array([math.nan, 2.0, math.inf, 1.0, math.nan, math.nan])
    assert extreme_rows(values, 4).tolist() == [1, 3, 4]
