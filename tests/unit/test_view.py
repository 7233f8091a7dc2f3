import dataclasses
import json
import math
import subprocess
import sys

import numpy as np
import pytest

from accel_nb.telemetry.events import (
    CheckpointSaved,
    Interrupted,
    MemorySample,
    MetricLogged,
    RankFailed,
    StepDone,
    WorkerPrepared,
)
from accel_nb.ui.panel_tables import MAX_BYTES, MEAN_RANK, pack_blocks
from accel_nb.ui.view import MAX_CURVES, MAX_METRICS, PanelState
from tests.ui.synthetic import training_events


def step(
    number: int, loss: float = 1.0, *, rank: int = 0, samples: int = 8, step_s: float = 0.01, skipped: bool = False
):
    return StepDone(rank, number, 100.0 + min(number, 10**6) * 0.01, loss, 1e-3, step_s, samples, skipped)


def memory(rank: int, when: float, amount: int = 100) -> MemorySample:
    return MemorySample(rank, 1, when, amount, amount, amount, amount, amount, 10**10)


def fold(*events, workers: int = 2) -> PanelState:
    state = PanelState("run", workers)
    state.apply(events)
    return state


def column(state: PanelState, rank: int, index: int, kind: str = "step", name: str = "") -> list[float]:
    return list(state.tables[kind, rank, name].columns[index])  # type: ignore[index]


def test_steps_of_more_losses_than_have_curves_are_counted():
    events = [dataclasses.replace(step(n), curve=f"loss ({n})") for n in range(1, 2 * MAX_CURVES + 1)]
    state = fold(*events, workers=1)
    assert (state.ranks.num_steps, len(state.loss_names), state.num_dropped) == (2 * MAX_CURVES, MAX_CURVES, 0)
    assert column(state, 0, 0, name=f"loss ({MAX_CURVES})") == [float(n) for n in range(MAX_CURVES, 2 * MAX_CURVES + 1)]


def test_summary_names_steps_loss_speed_and_workers():
    state = fold(*(step(n, 2.0 / n, rank=rank, step_s=0.005) for n in range(1, 121) for rank in (0, 1)))
    state.finish("done")
    assert state.summary() == "120 steps, loss 2 -> 0.0167, 5 ms/step, 2 workers"


def test_mean_weighs_ranks_by_their_samples():
    state = fold(step(1, 1.0, rank=0, samples=6), step(1, 4.0, rank=1, samples=2))
    assert column(state, MEAN_RANK, 1) == [pytest.approx(1.75)]


def test_mean_waits_for_the_slow_rank_and_is_completed_at_the_end():
    state = fold(step(1), step(2), step(1, 3.0, rank=1))
    assert column(state, MEAN_RANK, 0) == [1]
    state.finish("failed")
    assert column(state, MEAN_RANK, 0) == [1, 2]


def test_mean_goes_on_without_a_silent_rank():
    state = fold(*(step(n) for n in range(1, 5000)))
    assert len(state.tables["step", MEAN_RANK, ""]) > 100
    late = len(state.tables["step", MEAN_RANK, ""])
    state.apply(step(n, 3.0, rank=rank) for n in range(5000, 5100) for rank in (1, 0))
    state.apply(step(n, 1.0 + 2 * rank, rank=rank) for n in range(5100, 5200) for rank in (0, 1))
    assert column(state, MEAN_RANK, 1)[late + 50 :][-50:] == [2.0] * 50, "a rank that reports again counts again"


def test_the_mean_is_of_all_ranks_also_where_one_is_read_long_after_the_other():
    state = fold(*(step(n, 1.0 + 2 * rank, rank=rank) for rank in (0, 1) for n in range(1, 1000)))
    assert column(state, MEAN_RANK, 1) == [2.0] * 999


def test_one_worker_has_no_mean():
    state = fold(step(1), workers=1)
    assert ("step", MEAN_RANK, "") not in state.tables
    assert state.curve("loss") is state.tables["step", 0, ""]


def test_nan_loss_is_one_mark_a_row_of_nans_and_a_note():
    state = fold(step(1), step(2, math.nan), step(3, math.inf), step(4), workers=1)
    assert [(mark.kind, mark.x) for mark in state.marks] == [("nan", 2)]
    assert math.isnan(column(state, 0, 1)[1])
    assert state.notes() == ["loss not finite at step 2 and at 1 more"]
    json.dumps(state.facts(), allow_nan=False)


def test_a_step_that_is_nan_on_all_ranks_is_one():
    state = fold(*(StepDone(rank, n, float(n), math.nan, 1e-3, 0.01, 1, False) for n in (1, 2) for rank in (0, 1)))
    assert state.notes() == ["loss not finite at step 1 and at 1 more"]


def test_what_is_logged_without_steps_has_places_of_its_own():
    logged = [MetricLogged(rank, 0, 1.0, "reward", value) for value in (1.0, 2.0, 3.0) for rank in (0, 1)]
    table = fold(*logged).tables["metric", MEAN_RANK, "reward"]
    assert [list(column) for column in table.columns] == [[0, 1, 2], [1, 2, 3]]


def test_facts_name_a_loss_that_json_cannot_hold():
    assert fold(step(1, math.nan), workers=1).facts()["loss"] == "nan"


def test_skipped_steps_are_counted_once_over_ranks():
    state = fold(step(1, rank=0, skipped=True), step(1, rank=1, skipped=True))
    assert state.num_skipped == 1
    assert [mark.kind for mark in state.marks] == ["skipped"]


def test_steps_that_start_again_go_on_at_the_end_of_the_axis():
    state = fold(*(step(n) for n in (1, 2, 3, 1, 2, 3)), workers=1)
    assert column(state, 0, 0) == [1, 2, 3, 4, 5, 6]
    assert [mark.kind for mark in state.marks] == ["restart"]
    assert state.ranks.num_steps == 6


def test_a_repeated_step_is_a_step():
    state = fold(step(1), step(1), step(2), workers=1)
    assert column(state, 0, 0) == [1, 2, 3]
    assert not state.marks


def test_memory_is_over_time_which_never_goes_back():
    state = fold(memory(0, 100.0), memory(0, 101.5), memory(0, 90.0))
    assert column(state, 0, 0, "memory") == [0.0, 1.5, 1.5]
    assert column(state, 0, 7, "memory") == [500.0] * 3


def test_memory_alone_shows_no_panel():
    assert not fold(memory(0, 1.0), WorkerPrepared(0, 1.0, "cpu", "ddp", "no", (), ())).has_data
    assert fold(MetricLogged(0, 1, 1.0, "accuracy", 0.5)).has_data


def test_metrics_are_capped_in_number_and_length():
    state = fold(*(MetricLogged(0, 1, 1.0, f"{n}" + "x" * 1000, n) for n in range(1000)))
    assert len(state.metrics) == MAX_METRICS
    assert state.num_dropped == 1000 - MAX_METRICS
    assert max(map(len, state.metrics)) <= 64


def test_checkpoints_are_marked_at_their_steps_and_leave_room():
    state = PanelState("run", 1)
    for number in range(1, 501):
        state.apply([step(number)])
        if number % 2 == 0:
            state.apply([CheckpointSaved(0, number, 1.0, "runs/digits/x", 0.01, 0.2, 1000)])
    state.apply([step(501, loss=float("nan"))])
    marks = [mark for mark in state.marks if mark.kind == "checkpoint"]
    assert 32 <= len(marks) <= 64
    assert all(mark.x % 2 == 0 for mark in marks)
    assert (marks[0].x, marks[-1].x) == (2, 500)
    assert marks[0].text == "saved to runs/digits/x"
    assert state.marks[-1].kind == "nan"


def test_the_header_has_the_step_of_its_losses():
    state = fold(*(step(number, rank=0, loss=1 / number) for number in (1, 2, 3)), step(1, rank=1), step(2, rank=1))
    facts = state.facts()
    assert facts["step"] == 2
    assert facts["losses"][0]["value"] == pytest.approx((1 / 2 + 1.0) / 2)
    state.finish("interrupted")
    assert state.facts()["step"] == 3, "the rest is the mean over the ranks that have made the step"


def test_failure_and_interrupt_are_marks_with_a_short_note():
    state = fold(step(1), RankFailed(1, 1.0, "ValueError: " + "x" * 5000 + "\nmore"), Interrupted(0, 2.0))
    assert len(state.notes()[0]) <= 256
    assert state.notes()[0].startswith("rank 1 failed: ValueError")
    assert [mark.kind for mark in state.marks] == ["interrupted"], (
        "rank 1 failed before its first step: no place on the axis"
    )


@pytest.mark.parametrize(
    "event",
    [
        step(1, rank=7),
        step(1, rank=-1),
        step(1, None),  # type: ignore[arg-type]
        step(1, 1j),  # type: ignore[arg-type]
        step(1, "x"),  # type: ignore[arg-type]
        step(10**400),
        MetricLogged(0, 1, 1.0, "m", object()),  # type: ignore[arg-type]
        memory(0, math.nan),
        object(),
    ],
    ids=lambda event: type(event).__name__,
)
def test_malformed_events_are_dropped_and_counted(event):
    state = fold(step(1), event, step(2), workers=2)
    assert state.num_dropped == 1
    assert state.ranks.num_steps == 2
    assert {len(part) for part in state.tables["step", 0, ""].columns} == {2}


def test_straggler_is_the_rank_that_is_clearly_slower():
    def run(slow_s: float) -> PanelState:
        return fold(
            *(step(n, rank=r, step_s=slow_s if r == 2 else 0.01) for n in range(1, 20) for r in range(4)), workers=4
        )

    assert run(0.02).straggler() == 2
    assert run(0.0101).straggler() is None
    assert [rank["is_straggler"] for rank in run(0.02).facts()["ranks"]] == [False, False, True, False]


def test_growth_of_a_cpu_process_is_no_part_of_the_map():
    state = fold(WorkerPrepared(0, 0.0, "cpu", "single", "no", (), ()), step(1), memory(0, 1.0), workers=2)
    state.apply([WorkerPrepared(1, 0.0, "cuda:0", "single", "no", (), ()), memory(1, 1.0)])
    assert [column(state, rank, 4, "memory") for rank in (0, 1)] == [[0.0], [100.0]]
    assert [column(state, rank, 7, "memory") for rank in (0, 1)] == [[400.0], [500.0]]
    assert [rank["process_growth"] for rank in state.facts()["ranks"]] == [100.0, None]


def test_the_place_of_a_rank_in_a_mesh_is_a_fact():
    state = fold(WorkerPrepared(0, 0.0, "cpu", "fsdp", "no", (), (), "dp 0, tp 0"), step(1, rank=1), workers=2)
    assert [rank["place"] for rank in state.facts()["ranks"]] == ["dp 0, tp 0", ""]


def test_throughput_counts_all_ranks():
    state = fold(*(step(n, rank=r, samples=10) for n in range(1, 50) for r in (0, 1)))
    assert state.ranks.samples_per_s == pytest.approx(2000, rel=1e-6)
    state.finish("done")
    assert state.ranks.samples_per_s == pytest.approx(2000, rel=0.05)


def test_rows_since_gives_each_row_once():
    state = PanelState("run", 2)
    events = list(training_events(300))
    seen: dict = {}
    cursor: dict = {}
    for start in range(0, len(events), 37):
        state.apply(events[start : start + 37])
        found = state.tables.rows_since(cursor)
        assert found is not None
        blocks, cursor = found
        for block in blocks:
            seen.setdefault((block.table, block.rank, block.name), []).extend(block.columns[0])
    assert seen == {key: list(table.columns[0]) for key, table in state.tables.items() if len(table)}
    assert state.tables.rows_since(cursor) == ([], cursor)


def test_rows_since_stays_within_the_bytes_and_keeps_the_spike():
    state = PanelState("run", 2)
    state.apply(step(n, 99.0 if n == 500 else 1.0, rank=rank) for n in range(1, 5001) for rank in (0, 1))
    blocks, cursor = state.tables.rows_since({}, 8000) or ([], {})
    assert 0 < len(pack_blocks(blocks)[1]) <= 8000
    assert {block.rank: max(block.columns[1]) for block in blocks} == {0: 99.0, 1: 99.0, MEAN_RANK: 99.0}
    assert state.tables.rows_since(cursor) == ([], cursor), "what was picked stands for all"
    state.apply([step(5001)])
    (block,) = (state.tables.rows_since(cursor, 8000) or ([], {}))[0]
    assert list(block.columns[0]) == [5001]


def test_detail_holds_every_row_of_a_part_on_every_rank():
    state = PanelState("run", 2)
    state.apply(step(n, rank=rank) for n in range(1, 5001) for rank in (0, 1))
    blocks = state.tables.rows_between("step", "", 1000, 1099)
    assert {(block.rank, len(block.columns[0])) for block in blocks} == {(0, 100), (1, 100), (MEAN_RANK, 100)}
    assert all(len(block.columns[0]) <= 50 for block in state.tables.rows_between("step", "", 0, 9e9, 50))
    assert state.tables.rows_between("metric", "accuracy", 0, 9e9) == []
    assert state.tables.rows_between("step", "", 9000, 1) == []


def test_rows_since_asks_for_a_snapshot_when_rows_were_thinned_away():
    state = PanelState("run", 1, max_rows=6000)
    state.apply(step(n) for n in range(1, 7000))
    assert state.tables.rows_since({}) is None
    _, cursor = state.tables.snapshot(100)
    assert state.tables.rows_since(cursor) == ([], cursor)


def test_snapshot_is_bounded_and_packs_into_one_buffer():
    state = PanelState("run", 2)
    state.apply(training_events(20_000))
    blocks, _ = state.tables.snapshot(2000)
    headers, buffer = pack_blocks(blocks)
    assert max(header["rows"] for header in headers) <= 2000
    numbers = np.frombuffer(buffer)
    num_columns = {"step": 6, "metric": 2, "memory": 8}
    assert len(numbers) == sum(header["rows"] * num_columns[header["table"]] for header in headers)
    first = headers[0]
    steps = numbers[: first["rows"]] if first["table"] == "step" else None
    if steps is not None:
        assert (np.diff(steps) > 0).all()


def test_snapshot_of_many_ranks_stays_small():
    state = PanelState("run", 256)
    state.apply(step(n, rank=rank) for n in range(1, 300) for rank in range(256))
    assert len(pack_blocks(state.tables.snapshot()[0])[1]) < 2_000_000


def test_view_imports_nothing_heavy():
    code = (
        "import sys; from accel_nb.ui.panel import Panel; Panel('run', 2); "
        "print([m for m in ('torch', 'numpy', 'matplotlib', 'anywidget', 'ipywidgets') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_rates_leave_out_the_start_and_pauses():
    durations = [0.149] + [0.014] * 50 + [3.0] + [0.014] * 50
    state = fold(*(step(n, rank=0, step_s=s, samples=7) for n, s in enumerate(durations, 1)), workers=1)
    for _ in ("while it runs", "at the end"):
        assert state.ranks.step_ms == pytest.approx(14)
        assert state.ranks.samples_per_s == pytest.approx(7 / 0.014)
        state.finish("done")


def test_an_outcome_that_is_not_final_becomes_final():
    state = fold(step(1), workers=1)
    state.set_action_result("step 1 is being saved", is_final=False)
    state.apply([CheckpointSaved(0, 1, 1.0, "/runs/step_1", 0.1, 0.2, 99)])
    assert state.action_result == "saved to /runs/step_1, after step 1"
    state.set_action_result("stopping after this step ...", is_final=False)
    state.finish("done")
    assert state.action_result == "not completed: stopping after this step"


def test_a_million_steps_are_all_kept():
    state = PanelState("run", 1)
    state.apply(step(n) for n in range(1, 200_000))
    assert len(state.tables["step", 0, ""]) == 199_999
    assert MAX_BYTES["step"] > 48 * 1_000_000 * 9, "a million steps of eight ranks and their mean"
