from contextlib import suppress
from keyword import iskeyword

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_nb.cli import main
from accel_nb.config import OPTIONS, Config, Layer, flags_to_line, parse_flags, resolve, usage
from accel_nb.config.layers import nested
from accel_nb.errors import ConfigError


def test_empty_line_gives_nothing():
    assert parse_flags("") == Layer("flags", {}, "magic")
    assert parse_flags("  \t ").values == {}


def test_only_given_flags_are_in_the_layer():
    layer = parse_flags("--gpus=2 --precision bf16 --no-panel --no-return --ddp.static-graph --show-ranks 0,1")
    assert dict(layer.values) == {
        "gpus": "2",
        "precision": "bf16",
        "panel": False,
        "bring_back": False,
        "ddp.static_graph": True,
        "show_ranks": "0,1",
    }
    assert layer.problems == ()
    assert resolve([layer]).config.show_ranks == (0, 1)


@pytest.mark.parametrize("word", ["auto", "data", "model", "none"])
def test_every_value_of_divide_is_accepted(word: str):
    assert resolve([parse_flags(f"--divide {word}")]).config.divide == word


def test_flags_may_come_as_words():
    layer = parse_flags(["--name", "my run", "--static"], source="command line")
    assert dict(layer.values) == {"name": "my run", "static": True}
    assert layer.source == "command line"
    assert layer.origin("name").source == "--name 'my run'"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("--precison bf16", "--precison is not a flag; did you mean --precision?"),
        ("--prec bf16", "--prec is not a flag; did you mean --precision?"),
        ("--bring-back", "--bring-back is not a flag; did you mean --return?"),
        ("--show_ranks 1", "--show_ranks is not a flag; did you mean --show-ranks?"),
        ("--bucket-cap-mb 3", "--bucket-cap-mb is not a flag; did you mean --ddp.bucket-cap-mb?"),
        ("--xyzzy", "--xyzzy is not a flag; the option reference lists all flags"),
        ("-gpus 2", "-gpus is not a flag; did you mean --gpus?; flags start with two dashes"),
        ("-g 2", "-g is not a flag; flags start with two dashes"),
        ("--", "-- is not a flag; the option reference lists all flags"),
        ("train.py", "train.py comes before the first flag; only flags can be given here"),
        ("gpus 2", "gpus 2 comes before the first flag; did you mean --gpus?; only flags can be given here"),
        (
            "\u2014gpus 2",
            "\u2014gpus 2 comes before the first flag; did you mean --gpus?; only flags can be given here",
        ),
        ("--gpus", "--gpus needs a value; give a whole number from 1 to 1024, all or none"),
        ("--gpus --static", "--gpus needs a value; give a whole number from 1 to 1024, all or none"),
        ("--gpus 2 3", "3 after --gpus 2 belongs to no flag; remove it, or quote a value with spaces"),
        ("--static yes", "yes after --static belongs to no flag; remove it, or quote a value with spaces"),
        ("--panel=false", "--panel=false: the flag takes no value; write --panel or --no-panel"),
        ("--no-gpus", "--no-gpus is not a flag; did you mean --gpus?"),
        ("--gpus 2 --gpus 4", "--gpus 2 and --gpus 4 disagree; remove one of the two"),
        ("--panel --no-panel", "--panel and --no-panel disagree; remove one of the two"),
        ("--name 'x", 'a quotation mark in "--name \'x" is never closed; close it'),
        ("--gpus 2\0", "the flags contain the character '\\x00'; remove it"),
        ("--gpus 2\n--static", "the flags contain the character '\\n'; remove it"),
        ("--name \x1b[2J", "the flags contain the character '\\x1b'; remove it"),
        ("--single", "--single is a group of flags that has none yet; name one of its flags"),
    ],
)
def test_bad_line(line: str, problem: str):
    assert parse_flags(line).problems == (problem,)
    with pytest.raises(ConfigError) as caught:
        resolve([parse_flags(line)])
    assert caught.value.problems == [problem]


def test_group_names_its_flags():
    (problem,) = parse_flags("--ddp {}").problems
    assert "--ddp.find-unused-parameters, --ddp.bucket-cap-mb" in problem


def test_long_line_is_refused():
    assert "longer than" in parse_flags("--name " + "x" * 20_000).problems[0]


def test_problems_of_names_and_values_come_together():
    with pytest.raises(ConfigError) as caught:
        resolve([parse_flags("--gpus 0 --precison bf16 --clip -1.5 --timeout")])
    assert [problem.split()[0] for problem in caught.value.problems] == ["--precison", "--timeout", "gpus:", "clip:"]


def test_same_flag_twice_with_one_value_is_fine():
    assert parse_flags("--gpus 2 --gpus=2").problems == ()


def test_usage_names_every_flag():
    for option in OPTIONS.values():
        assert option.flag in usage()
        assert str(option.field.description) in usage()


names = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True).filter(lambda name: not iskeyword(name))
run_names = st.text(min_size=1, max_size=64).filter(
    lambda text: text.isprintable() and text == text.strip() and not set(text) & set("/\\") and text not in "..none"
)
ranks = st.lists(st.integers(0, 1023), min_size=1, max_size=4, unique=True).map(tuple)
configs = st.builds(
    Config,
    gpus=st.none() | st.just("all"),
    cpus=st.none() | st.integers(1, 256),
    precision=st.sampled_from(["no", "fp16", "bf16", "auto"]),
    accumulate=st.integers(1, 10**6),
    clip=st.none() | st.floats(min_value=1e-300, allow_infinity=False),
    seed=st.none() | st.integers(0, 2**63 - 1),
    batch=st.sampled_from([None, "per-worker", "global"]),
    name=st.none() | run_names,
    pull=st.lists(names, unique=True).map(tuple),
    bring_back=st.booleans(),
    show_ranks=st.just(()) | st.just("all") | ranks,
    ranks=st.none() | ranks,
    panel=st.booleans(),
    timeout=st.none() | st.floats(min_value=1e-6, max_value=1e6),
    config=st.none() | st.just("-odd name.yaml") | st.just("a,b.yaml"),
    ddp=st.fixed_dictionaries({"bucket_cap_mb": st.integers(1, 65536), "broadcast_buffers": st.booleans()}),
)


@settings(max_examples=40, deadline=None)
@given(configs)
def test_flags_round_trip(config: Config):
    layer = parse_flags(flags_to_line(config))
    assert layer.problems == ()
    assert Config.model_validate(nested(layer.values)) == config


pieces = st.lists(st.sampled_from(["--gpus", "2", "--ddp", "{", "-1", "''", "--pull=", "=", "[,"]))


@settings(max_examples=40, deadline=None)
@given(st.text(max_size=60) | pieces.map(" ".join))
def test_no_line_raises_anything_but_config_error(line: str):
    layer = parse_flags(line)
    assert all(problem.isprintable() for problem in layer.problems)
    with suppress(ConfigError):
        resolve([layer], read=lambda path: Layer("file", {}, path))


def test_layer_round_trip_keeps_explicit_defaults_and_nothing():
    line = "--precision no --panel --gpus none --pull= --name=-x"
    layer = parse_flags(line)
    assert flags_to_line(layer) == line
    assert flags_to_line(Layer("code", {"ddp": {"static_graph": True}}, "x")) == "--ddp.static-graph"
    assert flags_to_line(Config()) == ""
    with pytest.raises(ValueError, match="cannot be written as a flag"):
        flags_to_line(Layer("code", {"name": "a\nb"}, "x"))


def test_command_line_shows_config(capsys: pytest.CaptureFixture[str]):
    assert main(["config", "show", "--gpus", "2"]) == 0
    assert capsys.readouterr().out.splitlines()[0].split() == ["gpus", "2", "--gpus", "2", "(flags)"]
    assert main(["config", "schema"]) == 0
    assert main(["config", "docs"]) == 0
    assert main(["config", "flags"]) == 0
    assert main([]) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["confg"], "did you mean config?"),
        (["config"], "config needs a command"),
        (["config", "shw"], "did you mean show?"),
        (["config", "schema", "x"], "unrecognized arguments: x"),
        (["config", "show", "--gpus", "0", "--foo"], "--foo is not a flag"),
    ],
)
def test_command_line_exits_with_2_when_misused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err


@pytest.mark.parametrize(("text", "value"), [("500", 500), ("10min", "10min"), ("1.5h", "1.5h"), ("30d", "30d")])
def test_checkpoint_flags(text: str, value: object):
    config = resolve([parse_flags(f"--checkpoint runs --every {text} --resume auto")]).config
    assert (config.checkpoint.dir, config.checkpoint.every, config.checkpoint.resume) == ("runs", value, "auto")


@pytest.mark.parametrize("text", ["0", "-1", "5x", "0s", "31d", "min", "1.5"])
def test_wrong_intervals_say_what_is_allowed(text: str):
    with pytest.raises(ConfigError, match="a whole number of steps, a duration such as 30s, 10min"):
        resolve([parse_flags(f"--checkpoint runs --every={text}")])


@pytest.mark.parametrize("line", ["--every 5", "--resume auto"])
def test_what_needs_a_folder_of_checkpoints_says_so(line: str):
    with pytest.raises(ConfigError, match=r"checkpoint\.dir"):
        resolve([parse_flags(line)])


@pytest.mark.parametrize("flag", ["--timeout", "--group.timeout"])
def test_a_duration_is_read_in_every_option_of_time(flag: str):
    section = "group" if "." in flag else None
    for text, seconds in (("25s", 25.0), ("10min", 600.0), ("1.5h", 5400.0), ("7", 7.0)):
        config = resolve([parse_flags(f"{flag} {text}")]).config
        assert (config.group.timeout if section else config.timeout) == seconds


def test_a_comment_ends_a_line_of_flags():
    assert parse_flags("--cpus 2  # --seed 3").values == {"cpus": "2"}
    assert parse_flags("# only a comment").values == {}
    assert parse_flags("--name 'a # b'").values == {"name": "a # b"}
    assert parse_flags("--name a#b").values == {"name": "a#b"}
