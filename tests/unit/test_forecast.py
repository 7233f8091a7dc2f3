"""The forecast's arithmetic, its choice and its table: no torch needed."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_nb.config import parse_flags
from accel_nb.config.byte_sizes import size_text
from accel_nb.config.schema import OPTIONS
from accel_nb.errors import ConfigError
from accel_nb.forecast.header import numbered_blocks, read_safetensors
from accel_nb.forecast.layouts import LAYOUTS, Layout
from accel_nb.forecast.memory import Activations, MemoryUsage, estimate
from accel_nb.forecast.plans import Plan, RunSetting, choose_plan, forecast, max_samples_per_rank
from accel_nb.forecast.request import InputSpec, find_setting, read_request
from accel_nb.forecast.sizes import OPTIMIZERS, ModelSizes, WeightSize, count_text, with_optimizer
from accel_nb.forecast.table import as_data, as_markdown, as_text, explain
from accel_nb.runtime.process.hardware import Gpu, Machine

GIB = 2**30
BY_NAME = {layout.name: layout for layout in LAYOUTS}
MACHINE = Machine(8, 64 * GIB, 32 * GIB, GIB, GIB, (Gpu(0, "Card", 16 * GIB, 15 * GIB, (8, 0)),) * 2)

weights = st.lists(
    st.builds(
        WeightSize,
        name=st.uuids().map(str),
        shape=st.lists(st.integers(1, 40), min_size=0, max_size=3).map(tuple),
        itemsize=st.sampled_from([2, 4]),
        is_trainable=st.booleans(),
        block=st.sampled_from([None, "h.0", "h.1", "h.2"]),
    ),
    min_size=1,
    max_size=12,
)
models = st.builds(
    lambda made, name: with_optimizer(ModelSizes("m", tuple(made)), name), weights, st.sampled_from(sorted(OPTIMIZERS))
)


def dense(num_rows: int = 1024, num_blocks: int = 8) -> ModelSizes:
    made = [WeightSize(f"h.{index}.w", (num_rows, 1024), block=f"h.{index}") for index in range(num_blocks)]
    return with_optimizer(ModelSizes("dense", tuple(made)), "adamw")


def setting(room: int, world: int = 2, *, is_host: bool = False, **more: object) -> RunSetting:
    return replace(RunSetting(world, "devices", room, 100 * GIB, uses_host_memory=is_host), **more)  # type: ignore[arg-type]


@given(models, st.integers(1, 9), st.booleans())
def test_divided_parts_add_up_to_the_whole_and_hardly_more(model: ModelSizes, world: int, is_half: bool) -> None:
    whole = estimate(model, BY_NAME["ddp"], world)
    divided = estimate(model, BY_NAME["fsdp (3)"], world, is_half=is_half)
    padding = sum((world - 1) * math.prod(weight.shape[1:]) * weight.itemsize for weight in model.weights)
    for part in ("parameters", "gradients"):
        assert getattr(whole, part) <= world * getattr(divided, part) <= getattr(whole, part) + padding
    assert whole.optimizer <= world * divided.optimizer
    assert divided.total > 0


@given(models, st.integers(1, 4), st.integers(2, 3), st.booleans())
def test_ranks_that_share_a_copy_hold_what_they_would_alone(
    model: ModelSizes, ranks_per_replica: int, copies: int, is_half: bool
) -> None:
    world = ranks_per_replica * copies
    for name in ("fsdp (2)", "fsdp (3)"):
        hybrid = estimate(model, BY_NAME[name], world, is_half=is_half, ranks_per_replica=ranks_per_replica)
        alone = estimate(model, BY_NAME[name], ranks_per_replica, is_half=is_half)
        assert hybrid == replace(
            alone, communication_buffers=hybrid.communication_buffers, sent_bytes=hybrid.sent_bytes
        )
        assert hybrid.sent_bytes >= alone.sent_bytes
        assert (
            hybrid.communication_buffers == estimate(model, BY_NAME[name], world, is_half=is_half).communication_buffers
        )
    for name in ("ddp", "zero 3"):
        assert estimate(model, BY_NAME[name], world, ranks_per_replica=ranks_per_replica) == estimate(
            model, BY_NAME[name], world
        )


@given(models, st.integers(2, 9), st.booleans())
def test_each_stage_of_zero_takes_no_more_than_the_one_before(model: ModelSizes, world: int, is_half: bool) -> None:
    totals = [estimate(model, BY_NAME[f"zero {stage}"], world, is_half=is_half).total for stage in (1, 2, 3)]
    assert totals == sorted(totals, reverse=True)


@given(models, st.integers(1, 9))
def test_what_is_offloaded_is_on_the_host_instead(model: ModelSizes, world: int) -> None:
    on_device = estimate(model, BY_NAME["zero 3"], world)
    away = estimate(model, BY_NAME["zero 3 offload"], world)
    held = on_device.parameters + on_device.gradients + on_device.optimizer
    kept = away.parameters + away.gradients + away.optimizer + away.host
    assert held <= kept <= held + on_device.gradients  # the host steps a copy of the weights
    assert away.total <= on_device.total


def test_zero_divides_stage_by_stage() -> None:
    """Float32 weights and gradients, Adam's two, and a copy of the weights where the model's own are whole."""
    model, world = dense(), 8
    num = model.num_parameters
    expected = {1: (4, 4, 12 / world), 2: (4, 4 / world, 12 / world), 3: (4 / world, 4 / world, 8 / world)}
    for stage, factors in expected.items():
        usage = estimate(model, BY_NAME[f"zero {stage}"], world, is_half=True)
        assert (usage.parameters, usage.gradients, usage.optimizer) == tuple(num * factor for factor in factors)


def test_frozen_weights_have_no_gradients_and_no_state() -> None:
    model = dense()
    frozen = with_optimizer(
        replace(model, weights=tuple(replace(weight, is_trainable=False) for weight in model.weights)), "adamw"
    )
    for layout in LAYOUTS:
        usage = estimate(frozen, layout, 2)
        assert usage.gradients == usage.optimizer == usage.step == 0


def test_the_peak_is_the_fuller_of_backward_pass_and_step() -> None:
    assert MemoryUsage(1, 2, 3, activations=10, communication_buffers=5, step=7).total == 21
    assert MemoryUsage(1, 2, 3, activations=1, communication_buffers=1, step=7).total == 13


def test_half_precision_copies_weigh_only_where_autocast_makes_them() -> None:
    activations = Activations(100, weight_copies=10, cast_bytes=80)
    assert estimate(dense(), BY_NAME["ddp"], 2, is_half=True, activations=activations).activations == 110
    assert estimate(dense(), BY_NAME["fsdp (3)"], 2, is_half=True, activations=activations).activations == 80


def plan(layout: Layout, total: int, checkpoints: bool = False, host: int = 0) -> Plan:
    return Plan(layout, checkpoints, MemoryUsage(total, 0, 0, 0, host=host))


def everything_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Layout, "is_supported", True)
    monkeypatch.setattr("accel_nb.forecast.plans.has_checkpointing", lambda: True)


def test_the_cheapest_that_fits_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    everything_served(monkeypatch)
    plans = [
        plan(BY_NAME["fsdp offload"], 10, host=5),
        plan(BY_NAME["ddp"], 60, checkpoints=True),
        plan(BY_NAME["fsdp (3)"], 50),
        plan(BY_NAME["ddp"], 100),
    ]
    names = [choose_plan(plans, setting(room)).name for room in (100, 99, 60, 50, 49, 10)]  # type: ignore[union-attr]
    fsdp, offload = "fsdp (3)", "fsdp offload"
    assert names == ["ddp", fsdp, fsdp, fsdp, offload, offload]
    assert choose_plan(plans, setting(9)) is None
    assert choose_plan([plans[1], plans[0]], setting(70)).name == "ddp + activation checkpointing"  # type: ignore[union-attr]


def test_offloading_needs_room_on_the_host_for_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    everything_served(monkeypatch)
    plans = [plan(BY_NAME["fsdp offload"], 10, host=50)]
    assert choose_plan(plans, setting(10, host_bytes=100)) is not None
    assert choose_plan(plans, setting(10, host_bytes=99)) is None


def test_what_this_version_does_not_serve_is_shown_and_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel_nb.forecast.layouts.STRATEGIES", ("single", "ddp"))
    found = forecast(dense(), setting(GIB))
    unsupported = [plan for plan in found.plans if not plan.is_supported]
    assert len(unsupported) == len(found.plans) - 1
    assert choose_plan(unsupported, found.setting) is None
    for other in unsupported:
        assert f"{other.layout.name} *" in as_text(found)


def test_what_a_strategy_refuses_is_not_chosen_and_said() -> None:
    found = forecast(dense(), setting(100 * GIB))
    ddp, *others = found.plans
    refused = replace(found, plans=(replace(ddp, refusal="it is not for today"), *others))
    assert refused.best is others[0]
    assert explain(refused).startswith(f"-> {others[0].name} (")
    assert explain(refused).endswith("to spare; ddp was not chosen: it is not for today")
    taken = replace(found, plans=(ddp, *(replace(plan, refusal="nor these") for plan in others)))
    assert taken.best is ddp
    assert "was not chosen" not in explain(taken)


def test_on_cpu_workers_nothing_is_offloaded() -> None:
    assert not any(plan.layout.offloads for plan in forecast(dense(), setting(GIB, is_host=True)).plans)
    assert any(plan.layout.offloads for plan in forecast(dense(), setting(GIB)).plans)


@pytest.mark.parametrize("world", [1, 2, 8])
def test_each_world_has_one_way_of_plain_torch(world: int) -> None:
    plans = forecast(dense(), setting(GIB, world)).plans
    assert [plan.layout.name for plan in plans if plan.layout.sharding == "torch"] == [
        "single" if world == 1 else "ddp"
    ]


def test_a_batch_that_fits_nowhere_says_by_how_much_and_what_would() -> None:
    found = forecast(
        dense(), setting(GIB, is_host=True, batch_size=64, samples_per_rank=32, host_bytes=GIB), Activations(8 * GIB)
    )
    lacks = size_text(min(plan.missing_bytes(found.setting) for plan in found.plans if plan.is_supported))
    line = explain(found)
    assert found.best is None
    assert f"lacks {lacks}" in line
    share = max_samples_per_rank(next(plan for plan in found.plans if plan.is_supported), found.setting)
    assert 0 < share < 32
    assert f"a batch of about {2 * share}" in line
    smaller = forecast(
        dense(),
        replace(found.setting, batch_size=2 * share, samples_per_rank=share),
        Activations(8 * GIB * share // 32),
    )
    assert smaller.best is not None


def test_weights_that_fit_nowhere_do_not_blame_the_batch() -> None:
    line = explain(
        forecast(dense(), setting(2**20, is_host=True, batch_size=64, samples_per_rank=32), Activations(8 * GIB))
    )
    assert "use more or larger devices" in line
    assert "batch" not in line


def test_text_markdown_and_data_say_the_same() -> None:
    found = forecast(dense(), setting(GIB, batch_size=8, samples_per_rank=4), Activations(3 * 2**20), notes=["a note"])
    text, markdown, data = as_text(found), as_markdown(found), as_data(found)
    assert json.loads(json.dumps(data)) == data
    for row in data["plans"]:
        cells = [size_text(row[part]) for part in ("activations", "peak")]
        assert all(cell in text and cell in markdown for cell in cells)
    assert data["why"] == text.splitlines()[-1] == markdown.splitlines()[-1]
    assert "note: a note" in text
    assert max(map(len, text.splitlines()[:-1])) <= 120
    assert len({line.count("|") for line in markdown.splitlines() if line.startswith("|")}) == 1


def test_the_choice_is_reported_in_flags_that_are_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    line = explain(forecast(dense(), setting(GIB)))
    flags = line.partition("(")[2].partition(")")[0]
    assert parse_flags(flags).values == {"strategy": "ddp"}
    everything_served(monkeypatch)
    monkeypatch.setattr("accel_nb.forecast.plans.LAYOUTS", (BY_NAME["fsdp (2)"],))
    schema = {"strategy": OPTIONS["strategy"], "fsdp.reshard_after_forward": OPTIONS["ddp.static_graph"]}
    monkeypatch.setattr("accel_nb.config.flags.OPTIONS", schema)
    assert "(--strategy fsdp --no-ddp.static-graph)" in explain(forecast(dense(), setting(GIB)))


def test_unknown_activations_are_not_shown_as_none() -> None:
    found = forecast(dense(), setting(GIB))
    assert as_data(found)["plans"][0]["activations"] is None
    assert " ? " in as_text(found)


def test_counts_are_short() -> None:
    assert [count_text(count) for count in (10, 53_248, 124_439_808, 7_000_000_000)] == ["10", "53.2 k", "124 M", "7 G"]


def test_blocks_are_distinguished_from_names() -> None:
    names = ["wte.w", "h.0.mix.w", "h.0.mix.b", "h.1.mix.w", "head.0.w"]
    assert numbered_blocks(names) == {"h.0.mix.w": "h.0", "h.0.mix.b": "h.0", "h.1.mix.w": "h.1"}


def write(path: Path, header: object, body: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + body)
    return path


def entry(dtype: str, shape: list[int], start: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def test_a_header_gives_weights_and_buffers(tmp_path: Path) -> None:
    header = {
        "__metadata__": {"format": "pt"},
        "h.0.w": entry("F32", [4, 2], 0, 32),
        "h.1.w": entry("BF16", [4, 2], 32, 48),
        "ids": entry("I64", [3], 48, 72),
    }
    model = read_safetensors(write(tmp_path / "a.safetensors", header, bytes(72)))
    assert model.weights == (
        WeightSize("h.0.w", (4, 2), 4, block="h.0"),
        WeightSize("h.1.w", (4, 2), 2, block="h.1"),
    )
    assert model.buffer_bytes == 24


def test_a_folder_of_files_is_one_model(tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors", {"a": entry("F32", [2], 0, 8)}, bytes(8))
    write(tmp_path / "b.safetensors", {"b": entry("F32", [3], 0, 12)}, bytes(12))
    assert read_safetensors(tmp_path).num_parameters == 5
    write(tmp_path / "c.safetensors", {"b": entry("F32", [3], 0, 12)}, bytes(12))
    with pytest.raises(ConfigError, match="'b' is in another file"):
        read_safetensors(tmp_path)


HOSTILE = {
    "longer than the file": (b"{}", b"", 2**63),
    "longer than allowed": (b"{}", b"", 10**9),
    "no json": (b"{'a'", b"", None),
    "deep": (b"[" * 100_000, b"", None),
    "a list": (b"[]", b"", None),
    "no tensors": (b"{}", b"", None),
    "not a number": (b'{"a": {"dtype": "F32", "shape": [NaN], "data_offsets": [0, 4]}}', b"", None),
    "twice": (b'{"a": {}, "a": {}}', b"", None),
    "beyond the file": (json.dumps({"a": entry("F32", [2**40], 0, 2**42)}).encode(), b"1234", None),
    "negative": (json.dumps({"a": entry("F32", [-1], 0, 4)}).encode(), b"1234", None),
    "unknown dtype": (json.dumps({"a": entry("F31", [1], 0, 4)}).encode(), b"1234", None),
    "with a hole": (json.dumps({"a": entry("F32", [1], 4, 8)}).encode(), b"12345678", None),
    "bytes after the tensors": (json.dumps({"a": entry("F32", [1], 0, 4)}).encode(), b"12345678", None),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_header_is_refused_by_name(tmp_path: Path, case: str) -> None:
    header, body, length = HOSTILE[case]
    path = write(tmp_path / "bad.safetensors", header, body, length)
    with pytest.raises(ConfigError, match=r"bad\.safetensors"):
        read_safetensors(path)


@pytest.mark.parametrize("content", [b"", b"1234567"])
def test_a_file_without_a_header_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "short.safetensors"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"short\.safetensors"):
        read_safetensors(path)


def test_what_is_not_there_or_no_file_is_refused(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "pipe.safetensors")
    for name in ("none.safetensors", "pipe.safetensors"):
        with pytest.raises(ConfigError, match=name):
            read_safetensors(tmp_path / name)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="holds no"):
        read_safetensors(tmp_path / "empty")


def test_a_request_is_read_with_the_run_s_own_flags() -> None:
    words = "m.py:f --input 3x8x8 --target int64 --batch-size 64 --gpus 4 --memory 80GiB --precision bf16 --json"
    request = read_request(words.split(), "accel-nb estimate", in_notebook=False)
    assert request.inputs == (InputSpec(None, "float32", (3, 8, 8)),)
    assert request.label == InputSpec(None, "int64", ())
    assert (request.batch_size, request.memory, request.output_format) == (64, 80 * GIB, "json")
    config = request.config({})
    assert (config.gpus, config.precision) == (4, "bf16")
    assert request.other_devices(config) == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "MODEL"),
        ("a:b --gpu 3", "--gpu"),
        ("a:b --clip 3", "no use for --clip"),
        ("a:b --batch-size 0", "--batch-size"),
        ("a:b --batch-size " + "9" * 40, "--batch-size"),
        ("a:b --batch-size ٣", "--batch-size"),
        ("a:b --input 3y", "3y"),
        ("a:b --input float31:3", "float31:3"),
        ("a:b --input 0x3", "a size of"),
        ("a:b --input 3 --input 4", "need a name each"),
        ("a:b --input x=3 --input x=4", "need a name each"),
        ("a:b --memory 3parsecs", "3parsecs"),
        ("a:b --memory -3GiB", "--memory"),
        ("a:b --json --markdown", "not allowed with"),
        ("a:b --dtype int3", "--dtype"),
    ],
)
def test_wrong_words_are_refused(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_request(words.split(), "accel-nb estimate", in_notebook=False).config({})


def test_the_room_is_what_is_free_with_a_margin() -> None:
    config = read_request(["m:f", "--batch", "global"], "x", in_notebook=False).config({})
    on_gpus = find_setting(["cuda:0", "cuda:1"], MACHINE, config, batch_size=5)
    assert on_gpus.device_bytes == int(0.9 * 15 * GIB)
    assert (on_gpus.samples_per_rank, on_gpus.devices, on_gpus.uses_host_memory) == (3, "2 x Card", False)
    on_cpu = find_setting(["cpu", "cpu"], MACHINE, config)
    assert on_cpu.device_bytes == int(0.9 * 16 * GIB)
    each = read_request(["m:f", "--batch", "per-worker"], "x", in_notebook=False).config({})
    assert find_setting(["cpu", "cpu"], MACHINE, each, batch_size=5).samples_per_rank == 5
