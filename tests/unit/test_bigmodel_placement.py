"""Empty modules, sizes, device maps."""

from __future__ import annotations

import builtins
import random
import re
import threading
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from torch import nn
from traitlets.config import Config

from accel_nb.bigmodel.meta import init_empty_weights, init_on_device
from accel_nb.bigmodel.planning import sizes
from accel_nb.bigmodel.planning.device_map import (
    check_device_map,
    clean_device_map,
    get_balanced_memory,
    infer_auto_device_map,
    plan_device_map,
)
from accel_nb.bigmodel.planning.placement import describe_device_map, find_place
from accel_nb.bigmodel.planning.sizes import (
    _free_in_cgroups,
    available_host_memory,
    compute_module_sizes,
    find_blocks,
    find_tied_parameters,
    get_max_memory,
    list_tensors,
)
from accel_nb.errors import ConfigError
from accel_nb.runtime.devices.registry import device_type
from tests.support.transformer import Transformer

EVERYTHING = sum(t.numel() * 4 for t in [*Transformer().parameters(), *Transformer().buffers()])
BLOCK = compute_module_sizes(Transformer())["blocks.0"]


def test_empty_weights_take_no_memory_and_keep_ties_and_buffers() -> None:
    with init_empty_weights():
        model = Transformer()

    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert {buffer.device.type for buffer in model.buffers()} == {"cpu"}
    assert model.head.weight is model.embedding.weight
    assert nn.Linear(1, 1).weight.device.type == "cpu"


def test_buffers_are_empty_too_when_asked_for() -> None:
    with init_empty_weights(include_buffers=True):
        model = Transformer()
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"meta"}


def test_a_parameter_registered_twice_stays_one() -> None:
    with init_empty_weights():
        shared = nn.Parameter(torch.ones(3), requires_grad=False)
        shared.mark = 7  # type: ignore[attr-defined]
        model = nn.Module()
        model.a = shared
        model.b = shared
    assert model.a is model.b
    assert (model.a.mark, model.a.requires_grad) == (7, False)


def test_a_layer_tied_to_another_stays_tied_on_a_device_with_a_number() -> None:
    with init_on_device("cpu:0"):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model[1].weight = model[0].weight
    assert model[1].weight is model[0].weight


def test_other_threads_build_ordinary_modules() -> None:
    built: list[nn.Module] = []
    with init_on_device("meta"):
        other = threading.Thread(target=lambda: built.append(nn.Linear(2, 2)))
        other.start()
        other.join()
        assert nn.Linear(2, 2).weight.is_meta
    assert not built[0].weight.is_meta  # type: ignore[union-attr]


def test_hooks_are_gone_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), init_empty_weights():
        1 / 0
    assert not nn.Linear(1, 1).weight.is_meta


def test_sizes_count_a_tied_tensor_once() -> None:
    model = Transformer()
    sizes = compute_module_sizes(model)
    assert sizes[""] == EVERYTHING
    assert sizes["embedding.weight"] == 64 * 32 * 4
    assert sizes["head"] == 0
    assert find_tied_parameters(model) == [["embedding.weight", "head.weight"]]
    assert compute_module_sizes(model, buffers_only=True)[""] == 4 * 32 * 4
    assert compute_module_sizes(model, dtype="bfloat16")[""] == EVERYTHING // 2
    special = {"embedding.weight": torch.float32}
    assert compute_module_sizes(model, dtype=torch.float16, special_dtypes=special)["embedding"] == 64 * 32 * 4


def test_integer_tensors_keep_their_size_under_a_dtype() -> None:
    model = nn.Module()
    model.register_buffer("counts", torch.zeros(8, dtype=torch.int64))
    assert compute_module_sizes(model, dtype="float16")[""] == 64


def test_all_problems_of_max_memory_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        get_max_memory({-1: "1GB", "warp": 5, "cpu": "lots"})
    assert len(caught.value.problems) == 3
    with pytest.raises(ConfigError, match="max_memory is"):
        get_max_memory({})


def test_the_host_has_room_and_a_control_group_limits_it(tmp_path) -> None:
    assert available_host_memory() > 0
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "table").write_text("0::/a/b\n1:cpu:/x\n")
    (tmp_path / "a/memory.max").write_text("1000\n")
    (tmp_path / "a/memory.current").write_text("700\n")
    (tmp_path / "a/memory.stat").write_text("anon 5\ninactive_file 200\n")
    (tmp_path / "a/b/memory.max").write_text("max\n")
    assert _free_in_cgroups(tmp_path, tmp_path / "table") == [500]


def test_blocks_are_found() -> None:
    assert find_blocks(Transformer()) == ["Block"]
    assert find_blocks(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))) == []
    model = Transformer()
    model.blocks.append(None)  # pyright: ignore[reportArgumentType]
    assert find_blocks(model) == ["Block"], "an empty slot is no block"


def test_a_number_is_a_device_of_the_default_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "default_type", lambda: device_type("xpu"))
    assert sizes.to_torch_device(1) == torch.device("xpu", 1)


def test_everything_goes_to_the_first_device_that_holds_it() -> None:
    assert infer_auto_device_map(Transformer(), {0: "1GB", "cpu": "1GB"}) == {"": 0}


def test_what_does_not_fit_goes_to_memory_and_disk_and_blocks_stay_whole() -> None:
    model = Transformer(depth=6)
    limits = {0: 5 * BLOCK, "cpu": 2 * BLOCK}
    places = infer_auto_device_map(model, limits)
    check_device_map(model, places)
    assert {0, "cpu", "disk"} == set(places.values())
    assert all(name.count(".") <= 1 for name in places)
    assert find_place("head.weight", places) == find_place("embedding.weight", places) == 0
    held = dict.fromkeys((0, "cpu", "disk"), 0)
    for tensor in list_tensors(model):
        held[find_place(tensor.name, places)] += tensor.nbytes
    assert held[0] <= 3 * BLOCK, "room for two blocks on their way"
    assert held["cpu"] <= 2 * BLOCK


def test_room_is_kept_for_activations_and_cache() -> None:
    model = Transformer(tied=False)
    tight = {0: EVERYTHING + 64 * 32 * 4, "cpu": "1GB"}
    assert infer_auto_device_map(model, tight) == {"": 0}
    assert set(infer_auto_device_map(model, tight, activations=1000).values()) == {0, "cpu"}
    assert set(infer_auto_device_map(model, tight, kv_cache=1000).values()) == {0, "cpu"}


def test_a_part_larger_than_its_device_is_named_with_the_lack() -> None:
    with pytest.raises(ConfigError, match=r"blocks\.0 \(Block\) needs .* 'cpu'.*has a limit of 1000 B: .* too little"):
        infer_auto_device_map(Transformer(), {"cpu": 1000})


def test_a_full_disk_is_refused() -> None:
    with pytest.raises(ConfigError, match="on disk"):
        infer_auto_device_map(Transformer(), {"cpu": 3 * BLOCK, "disk": 10})


def test_fallback_gives_an_empty_device_what_fits() -> None:
    model = Transformer(tied=False)
    limits = {0: 300, 1: "1GB"}
    assert infer_auto_device_map(model, limits) == {"": 1}
    places = infer_auto_device_map(model, limits, fallback_allocation=True)
    assert find_place("norm.weight", places) == 0
    check_device_map(model, places)


def test_balanced_devices_hold_about_the_same() -> None:
    model = Transformer(depth=8, tied=False)
    total = compute_module_sizes(model)[""]
    limits = get_balanced_memory(model, {0: total, 1: total, "cpu": "1GB"})
    places = infer_auto_device_map(model, limits)
    held = [sum(t.nbytes for t in list_tensors(model) if find_place(t.name, places) == device) for device in (0, 1)]
    assert max(held) - min(held) <= 2 * BLOCK
    assert sum(held) == total

    low = plan_device_map(model, "balanced_low_0", {0: total, 1: total, 2: total})
    assert all(find_place(t.name, low) != 0 for t in list_tensors(model))
    assert plan_device_map(model, "sequential", {0: total, 1: total}) == {"": 0}


def test_balancing_leaves_limits_alone_when_the_model_does_not_fit() -> None:
    limits = {0: BLOCK, 1: BLOCK, "cpu": 10**9}
    assert get_balanced_memory(Transformer(depth=8), limits) == limits


@pytest.mark.parametrize("seed", range(25))
def test_any_plan_is_valid_and_within_limits(seed: int) -> None:
    draw = random.Random(seed)
    model = Transformer(depth=draw.randint(1, 7), tied=draw.random() < 0.5)
    if draw.random() < 0.5:
        model.blocks[-1].up.weight = model.blocks[0].up.weight  # type: ignore[union-attr]
    limits = {device: draw.randint(2 * BLOCK, 6 * BLOCK) for device in (0, 1, "cpu")}
    way = draw.choice(["sequential", "balanced", "balanced_low_0", "auto"])
    try:
        places = plan_device_map(model, way, limits)
    except ConfigError:
        assert way == "balanced_low_0" or limits[0] < 4 * BLOCK
        return
    check_device_map(model, places)
    for device, limit in limits.items():
        assert sum(t.nbytes for t in list_tensors(model) if find_place(t.name, places) == device) <= limit


def test_unknown_ways_are_refused() -> None:
    with pytest.raises(ConfigError, match="'best' is unknown; there are auto, balanced"):
        plan_device_map(Transformer(), "best")


def test_all_problems_of_a_map_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        check_device_map(
            Transformer(),
            {"embedding": "cpu", "head": "disk", "blocks": 0, "blocks.1": 0, "norms": "cpu", "positions": "warp:9"},
        )
    text = str(caught.value)
    assert len(caught.value.problems) == 5
    for part in ("'warp:9'", "did you mean 'norm'", "'blocks.1' and also 'blocks'", "norm.weight, norm.bias", "tied"):
        assert part in text
    with pytest.raises(ConfigError, match="device_map is"):
        check_device_map(Transformer(), {})
    with pytest.raises(ConfigError, match="this machine has"):
        check_device_map(Transformer(), {"": 99}, must_exist=True)


def test_a_map_is_cleaned_to_the_fewest_names() -> None:
    places = {"embedding": 0, "blocks.0.norm": 0, "blocks.0.mix": 0, "blocks.1": 1}
    assert clean_device_map(places) == {"embedding": 0, "blocks.0": 0, "blocks.1": 1}
    assert clean_device_map({"a.b": "cpu", "c": "cpu"}) == {"": "cpu"}


@pytest.mark.parametrize("limits", [{"cpu": 9 * BLOCK}, {0: 6 * BLOCK, "cpu": 5 * BLOCK}, {0: 20 * BLOCK}])
def test_blocks_that_are_away_lie_evenly_between_those_that_stay(limits: dict[Any, int]) -> None:
    model = Transformer(depth=12)
    planned = {way: plan_device_map(model, way, limits) for way in ("sequential", "auto")}
    held = {
        way: Counter({str(place): 0 for place in places.values()}) for way, places in planned.items()
    }  # fmt: skip
    for tensor in list_tensors(model):
        for way, places in planned.items():
            held[way][str(find_place(tensor.name, places))] += tensor.nbytes
    first = str(next(iter(limits)))
    assert held["auto"][first] >= held["sequential"][first], "no more is away than before"
    order = [str(find_place(f"blocks.{at}", planned["auto"])) for at in range(12)]
    main = "cpu" if "cpu" in limits and 0 not in limits else "0"
    away = [at for at, place in enumerate(order) if place != main]
    gaps = [second - first for first, second in pairwise([-1, *away])]
    assert bool(away) == (limits != {0: 20 * BLOCK})
    assert not gaps or max(gaps) - min(gaps) <= 1, order
    assert order.count("disk") == 0 or order.index("disk") > 0


def test_what_several_devices_compute_stays_together() -> None:
    model = Transformer(depth=12)
    limits: dict[Any, int] = {0: 6 * BLOCK, 1: 3 * BLOCK, "cpu": 4 * BLOCK}
    computed: dict[str, list[str]] = {}
    for way in ("sequential", "auto"):
        places = plan_device_map(model, way, limits)
        order = [str(find_place(f"blocks.{at}", places)) for at in range(12)]
        assert {"0", "1", "cpu"} <= set(order)
        computed[way] = ["0" if place in ("cpu", "disk") else place for place in order]
    assert computed["auto"] == computed["sequential"], "activations move no more often"


def test_a_plan_is_shown_as_a_table_and_as_bars() -> None:
    model = Transformer()
    limits = {0: 3 * BLOCK, "cpu": "1GB"}
    placement = describe_device_map(model, infer_auto_device_map(model, limits), max_memory=limits)
    table = str(placement)
    assert table.splitlines()[0].split() == ["device", "limit", "weights", "filled", "parts"]
    assert "%" in table
    on_device, in_memory = placement.places
    assert on_device.nbytes + in_memory.nbytes == sum(tensor.nbytes for tensor in list_tensors(model))
    bars = re.findall(r"width: ([0-9.]+)%; height: 100%", placement._repr_html_())
    shares = [on_device.nbytes / (3 * BLOCK), in_memory.nbytes / 10**9]
    assert [float(bar) for bar in bars] == pytest.approx([100 * share for share in shares], abs=0.06)


def test_bars_are_drawn_beyond_a_limit_without_one_and_with_names_that_are_no_markup() -> None:
    model = nn.ModuleDict({"<script>": nn.Linear(4, 4), "plain": nn.Linear(4, 8)})
    placement = describe_device_map(
        model, {"<script>": "cpu", "plain": "disk"}, max_memory={"cpu": 40}, notes=["<b>moved</b>"]
    )
    drawn = placement._repr_html_()
    assert "<script>" not in drawn
    assert "&lt;script&gt;" in drawn
    assert "&lt;b&gt;moved&lt;/b&gt;" in drawn
    assert re.findall(r"width: ([0-9.]+)%; height: 100%", drawn) == ["100.0", "100.0"]
    assert "80 B of 40 B (200%)" in drawn
    assert "160 B" in drawn


def test_a_notebook_shows_bars_and_a_script_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    placement = describe_device_map(Transformer(), {"": "cpu"}, max_memory={"cpu": "1GB"})
    placement.show()
    assert capsys.readouterr().out == f"{placement}\n"
    shell = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))
    try:
        with capture_output() as captured:
            placement.show()
    finally:
        shell.clear_instance()
        builtins.__dict__.pop("__IPYTHON__", None)
    [shown] = captured.outputs
    assert shown.data == {"text/plain": str(placement), "text/html": placement._repr_html_()}


def test_limits_by_torch_devices_are_those_of_their_names() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    limits = {torch.device("cpu"): 700, "disk": "1GB"}
    found = infer_auto_device_map(model, limits)
    assert found == infer_auto_device_map(model, {"cpu": 700, "disk": "1GB"})
