"""Starting jobs, and a notebook to start."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import nbformat

from accel_nb.runs import RunRegistry

TIMEOUT_S = 110

SETUP = """\
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
dataset = TensorDataset(torch.rand(1797, 64), torch.randint(10, (1797,)))
loader = DataLoader(dataset, batch_size=128, shuffle=True)
model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
"""
LOOP = """\
%%accelerate --cpus 4
for epoch in range(2):
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
print("trained")
"""
SAVE = "import sys\ntorch.save(model.state_dict(), sys.argv[1])\nlen(loader)"


def start(*words: str, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "accel_nb.cli", "launch", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def start_torchrun(*words: str) -> subprocess.Popen[str]:
    """Start PyTorch's own launcher with one rank of this machine."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", *words]
    variables = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=variables)


def launch(*words: str, **options: Any) -> tuple[int, str, str]:
    process = start(*words, **options)
    out, err = process.communicate(timeout=TIMEOUT_S)
    return process.returncode, out, err


def script(path: Path, text: str) -> str:
    path.write_text(textwrap.dedent(text))
    return path.name


def runs(folder: Path) -> list[Any]:
    return RunRegistry(folder / "state" / "accel_nb" / "runs").runs()


def write_digits(folder: Path) -> None:
    """Write ``digits.ipynb``: it trains on four workers, and saves the weights at its first argument."""
    cells = ["%load_ext accel_nb", SETUP, LOOP, SAVE, "%accelerate export again.py"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in cells])
    nbformat.write(notebook, folder / "digits.ipynb")
