"""Trainers of other packages print the same figures under the alias as under accelerate itself.

Each program runs twice, on the same data in the same order: once with accelerate, once with accel_nb under its name.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

_FIGURE = re.compile(r"^[\w.]+=-?\d+\.\d+$", re.MULTILINE)
_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "EVALUATED": "16"}


def run(package: str, program: str, *arguments: str, size: int, folder: Path) -> dict[str, float]:
    """Run a program on ``size`` processes with a package, and return the figures that it prints."""
    launcher = [] if size == 1 else ["torch.distributed.run", "--standalone", f"--nproc_per_node={size}", "-m"]
    words = [sys.executable, "-W", "ignore", "-m", *launcher, f"tests.ecosystem.programs.{program}", package]
    folder.mkdir()
    environment = {**os.environ, **_ENVIRONMENT, "FOLDER": str(folder)}
    found = subprocess.run([*words, *arguments], env=environment, capture_output=True, text=True, timeout=500)
    assert found.returncode == 0, found.stderr[-3000:]
    return {name: float(value) for name, value in (line.split("=") for line in _FIGURE.findall(found.stdout))}


@pytest.mark.timeout(1000)
@pytest.mark.parametrize(
    ("program", "size", "tolerance"),
    [
        ("trainer resume", 1, 0.0),
        ("trainer lora", 1, 0.0),
        ("sft", 1, 0.0),
        ("diffusion", 1, 0.0),
        ("trainer plain", 2, 0.0),
        ("trainer uneven", 2, 1e-6),  # weights and averages are multiplied in another order
        ("sft", 2, 0.0),
        ("trainer deepspeed", 2, 1e-6),
        ("trainer fsdp", 2, 1e-6),  # norms of shards are summed in another order
    ],
)
def test_figures_are_those_of_accelerate(program: str, size: int, tolerance: float, tmp_path: Path) -> None:
    name, *arguments = program.split()
    theirs = run("theirs", name, *arguments, size=size, folder=tmp_path / "theirs")
    ours = run("ours", name, *arguments, size=size, folder=tmp_path / "ours")
    assert len(theirs) > 5
    assert ours == (theirs if tolerance == 0 else pytest.approx(theirs, abs=tolerance))


@pytest.mark.timeout(600)
def test_packages_import_under_the_alias() -> None:
    code = """
from accel_nb import compat
compat.install()
import accelerate, datasets, diffusers, ignite.engine, lightning, peft, skorch.hf, transformers, trl
from diffusers import DDPMPipeline, StableDiffusionPipeline, UNet2DModel
from transformers import Seq2SeqTrainer, Trainer
from trl import DPOTrainer, GRPOTrainer, RewardTrainer, SFTTrainer
assert "accel_nb" in accelerate.__file__
"""
    environment = {**os.environ, **_ENVIRONMENT}
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env=environment, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr[-3000:]
