"""``accel-nb checkpoint``: what it says, and that bad input is one line and status 2."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from accel_nb.accelerator import Accelerator
from accel_nb.cli import main


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    accelerator = Accelerator(cpu=True, config={"checkpoint": {"dir": str(tmp_path / "runs")}})
    accelerator.prepare(model, torch.optim.Adam(model.parameters()))
    accelerator.save_state()
    accelerator.close()
    return tmp_path / "runs"


def reported(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main([*map(str, ("checkpoint", *words))]) == 0
    return capsys.readouterr().out


def test_inspect_says_what_is_there(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = reported(capsys, "inspect", saved)
    assert f"checkpoint  {saved}/step_0" in text
    assert "models/0/values/0.weight" in text
    facts = json.loads(reported(capsys, "inspect", saved / "step_0", "--json"))
    assert facts["world_size"] == 1
    assert [t["shape"] for t in facts["tensors"] if t["path"].endswith("0.weight")] == [[4, 4]]


def test_verify_finds_a_flipped_byte(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "all files are whole" in reported(capsys, "verify", saved)
    (path,) = (saved / "step_0").glob("tensors-*")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert main(["checkpoint", "verify", str(saved)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert path.name in lines[0]


def test_merge_writes_what_other_libraries_read(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reported(capsys, "merge", saved, "--out", tmp_path / "merged")
    weights = load_file(tmp_path / "merged" / "model.safetensors")
    assert set(weights) == {"0.weight", "0.bias", "1.bias"}  # tied: once


def test_reshard_holds_the_same_in_other_files(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reported(capsys, "reshard", saved, "--ranks", 3, "--out", tmp_path / "cut")
    assert len(list((tmp_path / "cut").glob("tensors-*"))) == 3
    before = json.loads(reported(capsys, "inspect", saved, "--json"))
    after = json.loads(reported(capsys, "verify", tmp_path / "cut", "--json"))
    assert after["bytes_by_dtype"] == before["bytes_by_dtype"]
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    accelerator.prepare(model, torch.optim.Adam(model.parameters()))
    assert accelerator.load_state(tmp_path / "cut").notes == ()
    accelerator.close()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("inspect nowhere", "no complete checkpoint"),
        ("inspect", "required"),
        ("", "required"),
        ("destroy x", "invalid choice"),
        ("reshard {saved} --ranks 0 --out {saved}/x", "--ranks 0"),
        ("reshard {saved} --ranks 2 --out {saved}/step_0", "exists"),
        ("merge {saved} --out {saved}/x --model 3", "no model 3"),
        ("merge {saved} --out {saved}/x --max-shard-size much", "max_shard_size is much"),
        ("verify nonsense://x/y", "no store can be opened"),
    ],
)
def test_bad_input_is_one_line_and_status_two(
    saved: Path, capsys: pytest.CaptureFixture[str], words: str, why: str
) -> None:
    assert main(["checkpoint", *words.format(saved=saved).split()]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert why in lines[0]


def test_looking_needs_no_torch(saved: Path) -> None:
    code = (
        "import sys; from accel_nb.cli import main; "
        f"status = main(['checkpoint', 'verify', {str(saved)!r}]); print(status, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 False"
