"""A job on a real Slurm: two virtual machines, one launcher on each, the weights of two ranks on one machine."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

import pytest
import torch

from accel_nb.cli.main import main
from tests.conftest import wait_for
from tests.launch.cluster import is_installed, running_slurm
from tests.launch.jobs import launch, write_digits

JOB_S = 150.0


@pytest.mark.nightly
@pytest.mark.skipif(not is_installed(), reason="needs Slurm's and munge's programs, and root to start them")
@pytest.mark.timeout(300)
def test_a_submitted_script_trains_on_two_machines(folder: Path):
    write_digits(folder)
    assert main(["export", "digits.ipynb", "digits.py"]) == 0
    code, _, err = launch("--cpus", "2", "digits.py", "script.pt")
    assert code == 0, err
    with tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp") as place, running_slurm(Path(place)) as variables:
        variables["MASTER_ADDR"] = "127.0.0.1"  # the virtual machines' names lead nowhere
        code, out, err = launch(
            "--slurm", "--nnodes", "2", "--cpus", "1", "--sbatch", "time=10", "digits.py", "slurm.pt", env=variables
        )
        assert code == 0, err
        assert "submitted job 1" in out
        assert wait_for(lambda: not _queued(variables), JOB_S)
        log = (folder / "digits-1.log").read_text()
    assert (folder / "slurm.pt").exists(), log
    ours, slurms = (torch.load(f"{name}.pt", weights_only=True) for name in ("script", "slurm"))
    # Each machine's worker has all its threads, which add in another order than one thread of two workers.
    assert all(torch.allclose(value, slurms[name], rtol=0, atol=1e-5) for name, value in ours.items())


def _queued(variables: dict[str, str]) -> str:
    done = subprocess.run(["squeue", "-h"], env=variables, capture_output=True, text=True, check=True)
    return done.stdout.strip()
