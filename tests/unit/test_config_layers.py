import json
import math
from contextlib import suppress

import pytest
from pydantic import ValidationError

from accel_nb.config import (
    OPTIONS,
    Config,
    DdpOptions,
    Layer,
    Origin,
    Resolved,
    current_layers,
    environment_layer,
    parse_flags,
    resolve,
    using_layers,
)
from accel_nb.config.schema import STRATEGIES
from accel_nb.errors import ConfigError


def problems_of(*layers: Layer) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        resolve(layers)
    assert "pydantic" not in str(caught.value)
    assert all("\n" not in problem for problem in caught.value.problems)
    return caught.value.problems


def code(source: str = "Accelerator(...)", **values: object) -> Layer:
    return Layer("code", values, source)


def test_defaults_when_no_layer_is_given():
    resolved = resolve()
    assert resolved.config == Config()
    assert set(resolved.origins) == set(OPTIONS)
    assert {origin.layer for origin in resolved.origins.values()} == {"default"}
    assert resolved.given == {}
    assert resolved.notes == ()


def test_config_is_frozen():
    with pytest.raises(ValidationError):
        resolve().config.gpus = 2  # pyright: ignore[reportAttributeAccessIssue]


def test_every_option_says_what_it_is():
    for option in OPTIONS.values():
        assert option.field.description, option.name
        assert "unit" in option.extra, option.name
        assert "None" not in option.allowed, option.name
        assert option.is_switch or option.metavar, option.name


def test_no_two_options_share_a_flag_or_variable():
    assert len({option.flag for option in OPTIONS.values()}) == len(OPTIONS)
    assert len({option.variable for option in OPTIONS.values()}) == len(OPTIONS)


def test_stronger_layer_wins_whatever_the_order_given():
    layers = [
        Layer("file", {"accumulate": 2, "seed": 2, "clip": 2, "batch": "global"}, "train.yaml"),
        environment_layer({"ACCEL_NB_ACCUMULATE": "3", "ACCEL_NB_SEED": "3", "ACCEL_NB_CLIP": "3", "HOME": "/"}),
        Layer("notebook", {"accumulate": 4, "seed": 4}, "sidebar"),
        Layer("flags", {"accumulate": 5}, "magic"),
    ]
    for given in (layers, layers[::-1]):
        resolved = resolve(given)
        assert resolved.config.model_dump(include={"accumulate", "seed", "clip", "batch", "timeout"}) == {
            "accumulate": 5,
            "seed": 4,
            "clip": 3.0,
            "batch": "global",
            "timeout": None,
        }
        assert resolved.origins["accumulate"] == Origin("flags", "magic")
        assert resolved.origins["seed"] == Origin("notebook", "sidebar")
        assert resolved.origins["clip"] == Origin("environment", "ACCEL_NB_CLIP=3")
        assert resolved.origins["batch"] == Origin("file", "train.yaml")
        assert resolved.origins["timeout"].layer == "default"


def test_later_of_two_layers_of_one_kind_wins():
    assert resolve([code(seed=1), code(seed=2)]).config.seed == 2


def test_none_gives_an_option_back():
    resolved = resolve([Layer("file", {"clip": 1.0}, "f"), parse_flags("--clip none")])
    assert resolved.config.clip is None
    assert resolved.origins["clip"].layer == "flags"


def test_sections_nested_or_dotted():
    nested = resolve([code(ddp={"bucket_cap_mb": 50})])
    dotted = resolve([Layer("code", {"ddp.bucket_cap_mb": 50}, "x"), environment_layer({})])
    variable = resolve([environment_layer({"ACCEL_NB_DDP__BUCKET_CAP_MB": "50"})])
    assert nested.config.ddp == dotted.config.ddp == variable.config.ddp == DdpOptions(bucket_cap_mb=50)
    assert variable.origins["ddp.bucket_cap_mb"].source == "ACCEL_NB_DDP__BUCKET_CAP_MB=50"
    assert variable.origins["ddp.static_graph"].layer == "default"


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("gpus", 0),
        ("gpus", -1),
        ("gpus", 2.0),
        ("gpus", True),
        ("gpus", "2.0"),
        ("gpus", "many"),
        ("gpus", 10**9),
        ("gpus", "9" * 5000),
        ("gpus", {"a": 1}),
        pytest.param("gpus", 10**5000, id="gpus-huge"),
        ("cpus", 257),
        ("cpus", "all"),
        ("precision", "fp32"),
        ("precision", False),
        ("precision", None),
        ("strategy", "zero"),
        ("strategy", 3),
        ("accumulate", 0),
        ("accumulate", None),
        ("clip", 0),
        ("clip", math.nan),
        ("clip", "inf"),
        ("clip", True),
        ("seed", -1),
        ("seed", 2**63),
        ("batch", "both"),
        ("name", ""),
        ("name", "a" * 65),
        ("name", "a/b"),
        ("name", "a\\b"),
        ("name", ".."),
        ("name", "a\x1b[2J"),
        ("name", 7),
        ("prepare", "maybe"),
        ("prepare", 1),
        ("pull", "a b"),
        ("pull", "a,,b"),
        ("pull", "class"),
        ("pull", 5),
        ("ranks", "0,x"),
        ("ranks", "-1"),
        ("ranks", []),
        ("ranks", True),
        ("show_ranks", "some"),
        ("show_ranks", [0.5]),
        ("timeout", 0),
        ("timeout", math.inf),
        ("timeout", 1e12),
        ("config", ""),
        ("config", "a\0b"),
        ("ddp.bucket_cap_mb", 0),
        ("ddp.static_graph", "perhaps"),
    ],
)
def test_bad_value_is_one_line_with_option_place_and_allowed_when_given_in_any_layer(option: str, value: object):
    for layer in ("notebook", "code"):
        (problem,) = problems_of(Layer(layer, {option: value}, "the place"))
        assert problem.startswith(f"{option}: ")
        assert "the place" in problem
        assert OPTIONS[option].allowed in problem
        assert problem.isprintable()
        assert len(problem) < 300


def test_problem_line_in_full():
    assert problems_of(parse_flags("--gpus 0")) == [
        "gpus: 0 from --gpus 0 (flags) is not allowed; give a whole number from 1 to 1024, all or none; "
        "correct or remove the flag"
    ]


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("precison", "precision"),
        ("mixed_precision", "precision"),
        ("bucket_cap_mb", "ddp.bucket_cap_mb"),
        ("ddp.bucket_cap", "ddp.bucket_cap_mb"),
        ("return", "bring_back"),
        ("gpu", "gpus"),
    ],
)
def test_unknown_name_gets_the_nearest(name: str, nearest: str):
    (problem,) = problems_of(Layer("code", {name: 1}, "Accelerator(...)"))
    assert problem == f"{name} is not an option (Accelerator(...) (code)); did you mean {nearest}?"


def test_unknown_name_when_nothing_is_near():
    assert problems_of(Layer("code", {"zzz": {"gpus": 1}}, "x")) == ["zzz is not an option (x (code))"]
    assert problems_of(Layer("code", {5: 1}, "x")) == ["5 is not an option (x); the names of options are text"]  # pyright: ignore


def test_planned_value_is_refused_by_name():
    (problem,) = problems_of(code(ddp={"comm_hook": "batched_power_sgd"}))
    assert problem == "ddp.comm_hook: batched_power_sgd from Accelerator(...) (code) is not supported by this version"


def test_unknown_strategy_lists_the_served_ones():
    (problem,) = problems_of(code(strategy="magic"))
    assert "auto, single, ddp, fsdp, deepspeed or xla" in problem
    assert STRATEGIES == ("auto", "single", "ddp", "fsdp", "deepspeed", "xla")


def test_unknown_variable_gets_the_nearest():
    (problem,) = problems_of(environment_layer({"ACCEL_NB_PRECISON": "bf16", "ACCEL": "x", "PATH": "y"}))
    assert problem == (
        "ACCEL_NB_PRECISON sets no option of accel_nb; did you mean ACCEL_NB_PRECISION?; correct or unset the variable"
    )


def test_all_problems_at_once():
    problems = problems_of(
        Layer("file", {"acumulate": 2, "clip": -1}, "f.yaml"),
        environment_layer({"ACCEL_NB_SEED": "x"}),
        parse_flags("--gpus 0 --precison bf16 --every 5 --cpus 2 --ranks 5 --panel=no"),
        code(strategy="zero", cpus=3),
    )
    assert len(problems) == 10
    for part in ("acumulate", "clip", "seed", "--precison", "--every", "--panel", "gpus", "zero", "disagree", "5"):
        assert any(part in problem for problem in problems), part


def test_code_and_flags_that_differ_are_an_error_naming_both():
    flags = parse_flags("--precision fp16")
    assert problems_of(flags, code(precision="bf16")) == [
        "precision: bf16 from Accelerator(...) (code) and fp16 from --precision fp16 (flags) disagree; "
        "remove one of the two"
    ]


def test_code_and_flags_that_agree_are_fine():
    resolved = resolve([parse_flags("--clip 1 --ranks 0,1"), code(clip=1.0, ranks=[0, 1])])
    assert resolved.config.clip == 1.0


def test_gpus_and_cpus_of_one_strength_clash():
    (problem,) = problems_of(parse_flags("--gpus 2 --cpus 2"))
    assert problem == (
        "gpus from --gpus 2 (flags) and cpus from --cpus 2 (flags): only one of the two can be given; remove one"
    )
    assert len(problems_of(parse_flags("--gpus 2"), code(cpus=2))) == 1


def test_gpus_of_a_weaker_layer_are_set_aside():
    resolved = resolve([Layer("file", {"gpus": 4}, "f.yaml"), parse_flags("--cpus 2")])
    assert (resolved.config.gpus, resolved.config.cpus) == (None, 2)
    assert resolved.notes == ("gpus from f.yaml (file) is ignored: cpus from --cpus 2 (flags) replaces it",)
    assert resolved.origins["gpus"].layer == "default"


def test_ranks_outside_of_the_world():
    (problem,) = problems_of(parse_flags("--cpus 2 --ranks 0,2,3"))
    assert "rank 2, 3 is outside of a world of 2; ranks go from 0 to 1" in problem
    resolved = resolve([parse_flags("--gpus all --show-ranks 1,4")])
    resolved.check_world(5)
    with pytest.raises(ConfigError, match=r"show_ranks from --show-ranks 1,4 .*rank 4 is outside of a world of 4"):
        resolved.check_world(4)


def test_pull_with_no_return_clashes():
    (problem,) = problems_of(parse_flags("--pull model --no-return"))
    assert "--pull model" in problem
    assert "--no-return" in problem


def test_settings_without_effect_are_noted():
    resolved = resolve([parse_flags("--strategy single --ddp.static-graph --static --no-panel")])
    assert (
        resolved.notes
        == (
            "static from --static (flags) has no effect: the panel is off",
            "ddp.static_graph from --ddp.static-graph (flags) has no effect: it belongs to ddp, and strategy is single",
        )
        or len(resolved.notes) == 2
    )
    assert resolve([parse_flags("--ddp.static-graph")]).notes == ()


@pytest.mark.parametrize(
    ("flag", "reason", "with_effect"),
    [
        ("--compile.mode default", "compile.backend is no", "--compile.backend inductor"),
        ("--compile.fullgraph", "compile.backend is no", "--compile.backend inductor"),
        ("--scaler.init-scale 8", "precision is no", "--precision auto"),
        ("--scaler.init-scale 8 --precision bf16", "precision is bf16", "--precision fp16"),
        ("--mesh.micro-batches 2", "mesh.pp is 1", "--pp 2"),
        ("--no-metrics.statsd-tags", "metrics.statsd is not set", "--metrics.statsd h:8125"),
        ("--notify.after 5", "neither notify.url nor notify.command is set", "--notify.url http://h"),
    ],
)
def test_options_of_what_is_off_are_noted(flag: str, reason: str, with_effect: str):
    (note,) = resolve([parse_flags(flag)]).notes
    assert note.endswith(f" has no effect: {reason}")
    assert resolve([parse_flags(f"{flag.partition(' --')[0]} {with_effect}")]).notes == ()


def test_explain_lists_every_option_with_its_origin():
    rows = resolve([parse_flags("--gpus 2")]).explain()
    assert [row.option for row in rows] == list(OPTIONS)
    assert (rows[0].option, rows[0].value, str(rows[0].origin)) == ("gpus", 2, "--gpus 2 (flags)")
    assert str(rows[1].origin) == "default"
    assert resolve([parse_flags("--gpus 2")]).table().splitlines()[0].split() == ["gpus", "2", "--gpus", "2", "(flags)"]


def test_json_round_trip():
    resolved = resolve(
        [parse_flags("--cpus 2 --ranks 0,1 --ddp.bucket-cap-mb 5 --strategy single --pull a,b --clip 1")]
    )
    text = resolved.to_json()
    json.loads(text)
    again = Resolved.from_json(text)
    assert again == resolved
    assert again.to_json() == text
    assert resolve(again.layers) == resolved


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "null",
        '{"version": 1}',
        "[" * 100_000,
        '{"version":1,"config":{"gpus":0},"origins":{},"notes":[]}',
        '{"version":1,"config":{},"origins":{"gpu":["flags","--gpu 1"]},"notes":[]}',
        '{"version":1,"config":{},"origins":{"gpus":[1]},"notes":[]}',
    ],
)
def test_damaged_document_is_refused(text: str):
    with pytest.raises(ConfigError, match="damaged"):
        Resolved.from_json(text)


def test_document_of_another_version_is_refused():
    with pytest.raises(ConfigError, match="version 2; this accel_nb reads 1"):
        Resolved.from_json('{"version": 2}')


def test_current_layers_are_set_only_inside_of_the_block():
    layers = [parse_flags("--cpus 2")]
    assert current_layers() == ()
    with suppress(ZeroDivisionError), using_layers(layers):
        assert current_layers() == tuple(layers)
        with using_layers([]):
            assert current_layers() == ()
        assert resolve([*current_layers(), code(accumulate=2)]).config.cpus == 2
        raise ZeroDivisionError
    assert current_layers() == ()


def test_layer_of_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="a layer is one of"):
        Layer("cli", {}, "x")


def test_nested_and_dotted_twice_is_refused():
    (problem,) = problems_of(code(**{"ddp": {"static_graph": True}, "ddp.static_graph": False}))
    assert "is set twice" in problem
    assert "is a group of options" in problems_of(code(ddp=5))[0]


def test_sizes_and_names_of_modules_are_checked():
    assert "a size such as 80GiB" in problems_of(code(memory="lots"))[0]
    assert "a size such as 80GiB" in problems_of(code(memory="0GiB"))[0]
    assert "names of modules" in problems_of(code(fp8={"skip_modules": ["a/b"]}))[0]
    given = {"memory": "16GiB", "precision": "fp8", "fp8": {"skip_modules": ["blocks.0", "head"]}}
    assert resolve([code(**given)]).config.fp8.skip_modules == ("blocks.0", "head")
    assert resolve([environment_layer({"ACCEL_NB_FP8__SKIP_MODULES": "none"})]).config.fp8.skip_modules is None
