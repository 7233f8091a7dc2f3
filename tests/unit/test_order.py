import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_nb.data.order import (
    BatchShare,
    contiguous_share,
    distribute_indices,
    even_length,
    flag_last,
    grouped,
    is_short,
    num_global_batches,
)

WORLDS = st.integers(1, 9)


@given(total=st.integers(0, 500), world=WORLDS)
def test_shares_partition_the_whole_in_order_and_differ_by_at_most_one(total, world):
    shares = [contiguous_share(total, world, rank) for rank in range(world)]

    assert [index for part in shares for index in part] == list(range(total))
    lengths = [len(part) for part in shares]
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)


@given(items=st.lists(st.integers()), size=st.integers(1, 5))
def test_groups_keep_every_item_in_order_and_only_the_last_is_short(items, size):
    groups = list(grouped(items, size))

    assert [item for group in groups for item in group] == items
    assert all(len(group) == size for group in groups[:-1])
    assert len(groups) == num_global_batches(len(items), size)


@given(items=st.lists(st.integers()), expected=st.none() | st.integers(0, 12))
def test_only_the_last_item_is_marked_whatever_length_was_announced(items, expected):
    marked = list(flag_last(items, expected))

    assert [item for item, _ in marked] == items
    marks = [is_last for _, is_last in marked]
    if items and (expected is None or expected <= len(items)):
        assert marks == [False] * (len(items) - 1) + [True]
    else:
        assert not any(marks)


def test_nothing_is_drawn_ahead_when_the_length_is_known():
    drawn = []

    def items():
        for number in range(4):
            drawn.append(number)
            yield number

    seen = [(item, len(drawn)) for item, _ in flag_last(items(), 4)]

    assert seen == [(0, 1), (1, 2), (2, 3), (3, 4)]


@pytest.mark.parametrize(
    ("expected", "marks"), [(None, [False] * 3), (3, [False, False, True]), (2, [False, True, True])]
)
def test_without_reading_ahead_items_are_marked_by_their_number(expected, marks):
    drawn = []
    items = (drawn.append(item) or item for item in range(3))
    seen = [(len(drawn), is_last) for _, is_last in flag_last(items, expected, reads_ahead=False)]
    assert seen == list(zip([1, 2, 3], marks, strict=True))


@given(total=st.integers(1, 40), world=WORLDS)
def test_one_global_batch_is_divided_without_loss_or_repeat(total, world):
    batch = [f"s{index}" for index in range(total)]

    dealt = [distribute_indices([batch], world, rank, is_last=True) for rank in range(world)]

    assert [index for indices, part in dealt if not part.is_filler for index in indices] == batch
    assert [part.num_samples for _, part in dealt] == [
        len(contiguous_share(total, world, rank)) for rank in range(world)
    ]
    for indices, part in dealt:
        assert part.total_samples == total
        assert part.is_last
        assert part.is_filler == (part.num_samples == 0)
        if part.is_filler:
            assert indices == ["s0"]


@given(sizes=st.lists(st.integers(1, 6), min_size=1, max_size=9), world=WORLDS)
def test_a_group_of_batches_is_divided_without_loss_or_repeat(sizes, world):
    sizes = sizes[:world]
    numbers = iter(range(100))
    group = [[next(numbers) for _ in range(size)] for size in sizes]

    dealt = [distribute_indices(group, world, rank, is_last=False) for rank in range(world)]

    assert [i for indices, part in dealt if not part.is_filler for i in indices] == list(range(sum(sizes)))
    if len(group) == world:
        assert [indices for indices, _ in dealt] == group


def test_a_full_group_gives_each_rank_its_batch_unchanged():
    group = [(0, 1), (2, 3)]

    assert distribute_indices(group, 2, 1, is_last=False)[0] is group[1]


def test_a_group_whose_last_batch_is_short_is_split_evenly():
    group = [[0, 1, 2, 3], [4]]

    assert is_short([4, 1], 2, 4)
    assert [distribute_indices(group, 2, rank, is_last=True, batch_size=4)[0] for rank in range(2)] == [
        [0, 1, 2],
        [3, 4],
    ]
    assert [distribute_indices(group, 2, rank, is_last=True)[0] for rank in range(2)] == group


def test_an_empty_batch_stays_empty():
    assert distribute_indices([[]], 2, 0, is_last=False) == ([], BatchShare(0, 0, False, False))


def test_an_empty_batch_in_a_full_group_makes_every_rank_split_the_rest():
    assert [distribute_indices([[0, 1], []], 2, rank, is_last=True)[0] for rank in range(2)] == [[0], [1]]


@given(items=st.lists(st.integers()), size=st.integers(1, 5))
def test_groups_that_lack_items_may_be_dropped(items, size):
    groups = list(grouped(items, size, drop_short=True))

    assert [item for group in groups for item in group] == items[: len(items) // size * size]
    assert len(groups) == num_global_batches(len(items), size, drop_short=True)


@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=9),
    world=WORLDS,
    batch_size=st.none() | st.integers(6, 9),
    num_fill=st.integers(1, 4),
)
def test_even_shares_are_equally_long_and_repeat_the_first_samples_at_the_end(sizes, world, batch_size, num_fill):
    sizes = sizes[:world]
    numbers = iter(range(100))
    group = [[next(numbers) for _ in range(size)] for size in sizes]
    total, fill = sum(sizes), [f"first {number}" for number in range(num_fill)]
    even = even_length(total, world, batch_size, world if len(sizes) > 1 else 1)

    dealt = [
        distribute_indices(group, world, rank, is_last=True, batch_size=batch_size, repeats=fill, num_even=even)
        for rank in range(world)
    ]

    lengths = {len(indices) for indices, _ in dealt}
    assert len(lengths) == 1
    assert {part.num_samples for _, part in dealt} == lengths
    assert all(part.total_samples == world * part.num_samples and not part.is_filler for _, part in dealt)
    assert [i for indices, part in dealt for i in indices[: part.num_valid]] == list(range(total))
    repeated = [i for indices, part in dealt for i in indices[part.num_valid :]]
    assert repeated == (fill * len(repeated))[: len(repeated)]
    assert lengths.pop() >= -(-total // world)
