import os
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_nb.config import Config, Layer, Origin, parse_flags, read_file, resolve, write_file
from accel_nb.errors import ConfigError


def write(tmp_path: Path, content: str | bytes) -> str:
    path = tmp_path / "train.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def problems_of(path: str) -> list[str]:
    started = time.perf_counter()
    with pytest.raises(ConfigError) as caught:
        resolve([read_file(path)])
    assert time.perf_counter() - started < 5
    assert all(problem.isprintable() for problem in caught.value.problems)
    return caught.value.problems


def test_values_come_with_their_lines(tmp_path: Path):
    path = write(
        tmp_path, "# ours\nprecision: no\naccumulate: 4\nddp:\n  static_graph: true\nranks: [0, 1]\nclip: 1e-1\n"
    )
    layer = read_file(path)
    resolved = resolve([layer])
    assert resolved.config.precision == "no"
    assert resolved.config.ddp.static_graph is True
    assert resolved.config.ranks == (0, 1)
    assert resolved.config.clip == 0.1
    assert resolved.origins["ddp.static_graph"] == Origin("file", f"{path}, line 5")


def test_config_flag_reads_the_file_below_all_other_layers(tmp_path: Path):
    path = write(tmp_path, "precision: bf16\naccumulate: 4\n")
    resolved = resolve([parse_flags(f"--config {path} --accumulate 2"), Layer("notebook", {"seed": 1}, "sidebar")])
    assert (resolved.config.precision, resolved.config.accumulate, resolved.config.seed) == ("bf16", 2, 1)
    assert resolved.origins["precision"].layer == "file"


def test_what_an_option_of_a_file_needs_may_be_given_elsewhere(tmp_path: Path):
    path = write(tmp_path, "checkpoint:\n  every: 100\n")
    assert resolve([parse_flags(f"--config {path} --checkpoint runs")]).config.checkpoint.every == 100
    with pytest.raises(ConfigError, match="it has no folder to save to"):
        resolve([parse_flags(f"--config {path}")])


def test_file_is_read_once_when_layers_travel(tmp_path: Path):
    path = write(tmp_path, "accumulate: 4\n")
    resolved = resolve([parse_flags(f"--config {path} --accumulate 2")])
    os.unlink(path)
    assert resolve(resolved.layers).config == resolved.config


def test_file_problems_come_with_all_others(tmp_path: Path):
    path = write(tmp_path, "precison: bf16\ngpus: 0\n")
    with pytest.raises(ConfigError) as caught:
        resolve([parse_flags(f"--config {path} --cpus 0")])
    assert len(caught.value.problems) == 3
    with pytest.raises(ConfigError, match="cannot be read"):
        resolve([parse_flags("--config /nowhere/x.yaml")])


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "holds no options"),
        ("# nothing\n", "holds no options"),
        ("- gpus\n- 2\n", "holds a list or a single value"),
        ("gpus", "holds a list or a single value"),
        ("gpus: 2\ngpus: 3\n", "line 2: gpus is set twice"),
        ("ddp: {static_graph: true, static_graph: false}", "line 1: ddp.static_graph is set twice"),
        ("ddp: {static_graph: true}\nddp.static_graph: false", "is set twice"),
        ("precison: bf16", "precison is not an option ({path}, line 1 (file)); did you mean precision?"),
        ("ddp:\n  bucket: 3", "ddp.bucket is not an option"),
        ("ddp: 3", "ddp is a group of options"),
        ("gpus: '2.5'", "gpus: 2.5 from {path}, line 1 (file) is not allowed; give a whole number from 1 to 1024"),
        ("gpus: yes", "gpus: yes"),
        ("panel: 1", "give true or false"),
        ("precision: ~", "precision: none"),
        ("accumulate: 010.5", "accumulate: 10.5"),
        ("clip: .nan", "clip: nan"),
        ("clip: .inf", "clip: inf"),
        ("clip: -.INF", "clip: -inf"),
        ("name: !!python/object/apply:os.system ['true']", "line 1: tags such as"),
        ("name: !local x", "line 1: tags such as !local are not allowed"),
        ("!!map {gpus: 2}", "tags such as"),
        ("a: &a [1]\nb: *a", "line 1: anchors and aliases are not allowed"),
        ("b: *a", "anchors and aliases are not allowed"),
        ("<<: {gpus: 2}", "<< is not an option"),
        ("gpus: 2\n---\ngpus: 3", "a second document starts"),
        ("gpus: [", "is not YAML"),
        ("gpus: 2\n\tcpus: 3", "is not YAML"),
        ("? [1]\n: 2", "is not YAML"),
        ("1: 2", "1 is not an option"),
        ("gpus: " + "[" * 20, "nested deeper than 8"),
        ("[" * 60_000, "nested deeper than 8"),
        ("a: {" * 15_000, "nested deeper than 8"),
        ("gpus: \x1b", "a character that YAML does not allow"),
        ("gpus: 2\0", "a character that YAML does not allow"),
        ("version: 2\ngpus: 2", "has version 2, written by a newer accel_nb; this version reads up to 1"),
        ("version: 0", "version is 0"),
        ("version: one", "version is one"),
        ("version: true", "version is True"),
        ("config: other.yaml", "names a further file"),
        ("background: true\nmax_restarts: 5", "a run in the background is not started again"),
        ("gpus: 2\ncpus: 2", "only one of the two can be given"),
        (b"\xff\xfeg\0p\0", "byte 0 is not UTF-8"),
        (b"name: \xe9\n", "byte 6 is not UTF-8"),
        (bytes(range(256)) * 8, "byte 128 is not UTF-8"),
        ("x: " + "y" * 70_000, "is larger than 64 KiB"),
    ],
)
def test_bad_file(tmp_path: Path, content: str | bytes, problem: str):
    path = write(tmp_path, content)
    found = problems_of(path)
    assert len(found) == 1
    assert problem.replace("{path}", path) in found[0]


def test_several_problems_are_reported_at_once(tmp_path: Path):
    assert len(problems_of(write(tmp_path, "gpus: 0\nprecison: no\nversion: 9\n"))) == 3


def test_missing_folder_fifo_and_device(tmp_path: Path):
    os.mkfifo(tmp_path / "fifo")
    assert "No such file" in problems_of(str(tmp_path / "none.yaml"))[0]
    assert "is a folder" in problems_of(str(tmp_path))[0]
    assert "not a plain file" in problems_of(str(tmp_path / "fifo"))[0]
    assert "not a plain file" in problems_of("/dev/zero")[0]
    assert "not a path" in problems_of("a\0b")[0]
    assert "File name too long" in problems_of("a" * 5000)[0]


def test_utf8_signature_and_crlf_are_fine(tmp_path: Path):
    assert dict(read_file(write(tmp_path, b"\xef\xbb\xbfname: caf\xc3\xa9\r\n")).values) == {"name": "café"}


def test_plain_words_are_those_of_yaml_1_2(tmp_path: Path):
    path = write(tmp_path, "precision: no\naccumulate: 010\nname: 12:30:45\nseed: +5\n")
    assert dict(read_file(path).values) == {"precision": "no", "accumulate": 10, "name": "12:30:45", "seed": 5}


def test_written_file_holds_only_what_was_given(tmp_path: Path):
    path = tmp_path / "out.yaml"
    write_file(resolve([parse_flags("--precision no --gpus 2 --ranks 0,1 --ddp.static-graph")]), path)
    assert path.read_text() == (
        "# Options of accel_nb; docs/options.md lists them all.\n"
        "version: 1\ngpus: 2\nprecision: 'no'\nranks:\n- 0\n- 1\nddp:\n  static_graph: true\n"
    )


def test_write_refuses_wrong_options_and_places(tmp_path: Path):
    path = tmp_path / "out.yaml"
    path.write_text("old")
    with pytest.raises(ConfigError, match="gpus: 0 from the options to write"):
        write_file({"gpus": 0}, path)
    assert path.read_text() == "old"
    with pytest.raises(ConfigError, match="not a plain file"):
        write_file({"gpus": 1}, tmp_path)
    with pytest.raises(ConfigError, match="cannot be written"):
        write_file({"gpus": 1}, tmp_path / "none" / "x.yaml")
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.yaml"]
    write_file({}, path)
    assert read_file(path).values == {}


def is_run_name(text: str) -> bool:
    return text.isprintable() and text == text.strip() and not set(text) & set("/\\") and text not in "..none"


run_names = st.sampled_from(["no", "1e5", "null", "010", "12:30", "~x", "true", "- a", "a: b", "# c", "0x1", "=", "<<"])
values = st.fixed_dictionaries(
    {},
    optional={
        "gpus": st.sampled_from(["all", 4, 1024]),
        "precision": st.sampled_from(["no", "bf16"]),
        "clip": st.none() | st.floats(min_value=1e-300, allow_infinity=False),
        "seed": st.none() | st.integers(0, 2**63 - 1),
        "name": run_names
        | st.text(min_size=1, max_size=64).filter(
            lambda text: (
                text.isprintable() and text == text.strip() and not set(text) & set("/\\") and text not in "..none"
            )
        ),
        "pull": st.sampled_from([(), ("a",), ("no", "y", "model")]),
        "show_ranks": st.sampled_from([(), "all", (0, 3)]),
        "panel": st.booleans(),
        "ddp": st.fixed_dictionaries(
            {}, optional={"bucket_cap_mb": st.integers(1, 65536), "static_graph": st.booleans()}
        ),
    },
)


@settings(max_examples=40, deadline=None)
@given(values)
def test_file_round_trip(tmp_path_factory: pytest.TempPathFactory, given_values: dict[str, object]):
    path = tmp_path_factory.mktemp("round") / "x.yaml"
    resolved = resolve([Layer("code", given_values, "test")])
    write_file(resolved, path)
    assert resolve([read_file(path)]).config == resolved.config
    write_file(resolved.config, path)
    assert resolve([read_file(path)]).config == resolved.config


def test_config_object_round_trip(tmp_path: Path):
    write_file(Config(gpus=2, pull=("a", "b")), tmp_path / "x.yaml")
    assert resolve([read_file(tmp_path / "x.yaml")]).config == Config(gpus=2, pull=("a", "b"))
