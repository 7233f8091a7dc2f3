"""`accel-nb estimate` as users call it: its answers, its exit status and what it says to bad input."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from accel_nb.cli import main

TRANSFORMER = "tests.support.transformer:Transformer"
GPT2 = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 2, "n_head": 2, "n_embd": 32}


def test_a_python_path_gives_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    words = f"estimate {TRANSFORMER} --input int64:16 --target int64:16 --batch-size 64 --cpus 2"
    assert main(words.split()) == 0
    text = capsys.readouterr().out
    assert "batch 64 = 2 x 32" in text
    assert "-> ddp (--strategy ddp): the simplest way fits" in text
    assert "\x1b" not in text


def test_json_is_the_same_for_machines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*f"estimate {TRANSFORMER} --input int64:16 --batch-size 8 --cpus 1 --json".split()]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["model"]["num_parameters"] == 53_312
    assert data["best"] == {"name": "single", "options": {"strategy": "single"}}
    assert data["plans"][0]["activations"] > 0


@pytest.mark.nightly
def test_a_batch_that_fits_no_plan_exits_with_1_and_says_by_how_much(capsys: pytest.CaptureFixture[str]) -> None:
    words = f"estimate {TRANSFORMER} --input int64:16 --target int64:16 --batch-size 4096 --cpus 2 --memory 20MiB"
    assert main(words.split()) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("-> nothing fits: ")
    assert " lacks " in last
    assert "a batch of about " in last


def test_safetensors_are_read_without_torch(tmp_path: Path) -> None:
    save_file({f"h.{index}.w": torch.zeros(64, 64) for index in range(3)}, tmp_path / "m.safetensors")
    code = (
        "import sys; from accel_nb.cli import main; "
        f"status = main(['estimate', {str(tmp_path / 'm.safetensors')!r}, '--cpus', '2', '--dtype', 'bfloat16']); "
        "print(status, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *_, last = done.stdout.splitlines()
    assert last == "0 False"
    assert "12.3 k parameters" in done.stdout
    assert "24.0 KiB" in done.stdout


def test_a_transformers_config_makes_the_model_or_asks_for_the_library(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**GPT2, "auto_map": {"AutoModel": "evil--code"}}))
    words = f"estimate {tmp_path / 'config.json'} --sequence 16 --batch-size 4 --cpus 1"
    status, captured = main(words.split()), capsys.readouterr()
    if importlib.util.find_spec("transformers") is None:
        assert (status, captured.out) == (2, "")
        assert "pip install transformers" in captured.err
        assert len(captured.err.splitlines()) == 1
    else:
        assert status == 0
        assert "GPT2LMHeadModel" in captured.out
        assert "note" not in captured.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("estimate", "needs a MODEL"),
        ("estimate --cpus 2 a:b", "needs a MODEL, before any flag"),
        ("estimate nothing", "is not a model"),
        ("estimate no.such.module:name", "No module named"),
        ("estimate math:pi", "gives no model"),
        ("estimate json:JSONEncoder", "is a JSONEncoder; name a torch module"),
        ("estimate torch.nn:Linear", "gives no model: TypeError"),
        ("estimate none.safetensors", "none.safetensors cannot be read"),
        ("estimate none.json", "none.json cannot be read"),
        (f"estimate {TRANSFORMER} --gpus 99", "--gpus 99"),
        (f"estimate {TRANSFORMER} --optimizer adamww", "did you mean adamw?"),
        (f"estimate {TRANSFORMER} --strategy ddp", "has no use for --strategy"),
        (f"estimate {TRANSFORMER} --batchsize 3", "--batchsize"),
    ],
)
def test_bad_input_is_one_line_and_status_2(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"model_type": 3}', '{"model_type": "x", "model_type": "y"}', "{" * 99999]
)
def test_a_config_that_is_none_is_refused(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(text)
    assert main(["estimate", str(tmp_path / "config.json")]) == 2
    assert "config.json" in capsys.readouterr().err


def test_a_config_that_is_too_large_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(" " * (1 << 20) + "{}")
    assert main(["estimate", str(tmp_path / "config.json")]) == 2
    assert "larger than" in capsys.readouterr().err


def test_the_path_for_imports_is_put_back(capsys: pytest.CaptureFixture[str]) -> None:
    before = list(sys.path)
    main(f"estimate {TRANSFORMER} --cpus 1".split())
    assert sys.path == before
    assert "note: activations are not counted: no batch is known" in capsys.readouterr().out
