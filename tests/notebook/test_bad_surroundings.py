"""Packages that are too old, an unwritable home, no compiler, unusual folders: one line each, and cells run."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support.kernel import Kernel, Output, running_kernel

REQUIREMENTS = {one.name: one for one in map(Requirement, metadata.requires("accel_nb") or []) if not one.marker}
OLD = {"torch": "2.4.0", "ipykernel": "6.15.0"}
NO_HOME = "/proc/self/fdinfo"
"""A folder in which nobody, the superuser included, can make a file."""
SETUP = """
import torch
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.ones(16, 4)), batch_size=4)
"""
LOOP = """
for (inputs,) in loader:
    model(inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print("ended")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("with spaces, ä and 文")


@pytest.fixture(scope="module")
def kernel(folder: Path) -> Iterator[Kernel]:
    for name, version in OLD.items():
        facts = folder / "site packages" / f"{name}-{version}.dist-info"
        facts.mkdir(parents=True)
        (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    with running_kernel() as kernel:
        code = f"""
import os, sys
sys.path.insert(0, {str(folder / "site packages")!r})
os.environ |= {{"HOME": {NO_HOME!r}, "PATH": os.path.dirname(sys.executable), "CXX": "no-such-compiler"}}
os.environ.pop("XDG_STATE_HOME", None)
# Both use a folder in /tmp where a home is read-only; they ask for permissions, which the superuser always has.
os.environ["MPLCONFIGDIR"] = os.environ["IPYTHONDIR"] = {str(folder)!r}
os.chdir({str(folder)!r})
"""
        assert kernel.run(code).error is None
        yield kernel


@pytest.fixture(scope="module")
def load(kernel: Kernel) -> Output:
    return kernel.run("%load_ext accel_nb")


def test_packages_that_are_too_old_are_named_with_a_remedy(load: Output):
    assert load.error is None
    assert len(load.stderr.splitlines()) == 2
    for name, version in OLD.items():
        needed = str(REQUIREMENTS[name])
        assert f"accel_nb needs {needed}, and {version} is installed: pip install '{needed}'" in load.stderr


def test_cells_run_and_save_without_a_home_in_a_folder_with_an_unusual_name(kernel: Kernel, load: Output, folder: Path):
    assert kernel.run(SETUP).error is None
    output = kernel.run(f"%%accelerate --cpus 2 --checkpoint 'kept in ü' --every 2\n{LOOP}")
    assert (output.error, output.stdout) == (None, "ended\n")
    assert len([line for line in output.stderr.splitlines() if "runs are not recorded" in line]) == 1
    assert any((folder / "kept in ü").iterdir())
    output = kernel.run(f"%%accelerate --cpus 2 --checkpoint 'kept in ü' --resume auto\n{LOOP}")
    assert output.error is None


def test_the_doctor_names_what_is_wrong(kernel: Kernel, load: Output):
    found = kernel.run("%accelerate doctor").stdout
    for part in (
        *(f"[WARN] accel_nb needs {REQUIREMENTS[name]}, and {version} is installed" for name, version in OLD.items()),
        "runs are not recorded; set XDG_STATE_HOME",
        "the C++ compiler no-such-compiler is not installed",
    ):
        assert part in found


def test_a_missing_extra_is_named_with_its_command(kernel: Kernel, load: Output):
    output = kernel.run("%%accelerate --cpus 2 --strategy xla\n1")
    assert output.error is not None
    assert "torch_xla is not installed" in output.error[1]
    assert "pip install 'torch==2.9.*' 'torch_xla==2.9.*'" in output.error[1]
    assert kernel.value("1 + 1") == 2
