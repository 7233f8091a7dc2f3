"""Packages that are too old, an unwritable home, no compiler, unusual folders: one line each, and cells run."""

from __future__ import annotations

import subprocess
import sys
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

SANDBOX = ("unshare", "--map-root-user", "--net", "--mount")
"""Runs a command in namespaces of its own: without a network, and free to mount file systems."""
IN_SANDBOX = """
import subprocess
from IPython.core.interactiveshell import InteractiveShell

def run(*command):
    subprocess.run(command, check=True)

def show(code):
    result = shell.run_cell(code, silent=True)
    error = result.error_before_exec or result.error_in_exec
    print("error:", None if error is None else f"{type(error).__name__}: {error}", flush=True)

shell = InteractiveShell.instance()
run("mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", "/dev/shm")
cell = "%%accelerate --cpus 2\\nimport torch\\nvalues = torch.ones(100_000)\\nsize = torch.distributed.get_world_size()"
show("%load_ext accel_nb")
show(cell)
run("ip", "link", "set", "lo", "name", "own0")
run("ip", "link", "set", "own0", "up")
run("ip", "link", "set", "own0", "down")
show(cell)
run("ip", "link", "set", "own0", "up")
show(cell)
print(shell.user_ns["size"], float(shell.user_ns["values"].sum()))
shell.run_cell("%accelerate doctor")
show("%unload_ext accel_nb")
"""

OTHER_SYSTEM = """
import os, platform, sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
del os.memfd_create
sys.modules["fcntl"] = None
platform.system = lambda: "Windows"
result = shell.run_cell("%load_ext accel_nb")
print(shell.run_cell("1 + 1").result, "accelerate" in shell.magics_manager.magics["cell"])
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


def test_compiling_without_a_compiler_is_refused_on_all_workers(kernel: Kernel, load: Output):
    kernel.run(SETUP)
    output = kernel.run(f"%%accelerate --cpus 2 --compile.backend inductor\n{LOOP}")
    assert output.error is not None
    assert output.error[0] == "ConfigError"
    assert "which needs a C++ compiler, and no-such-compiler is not installed: install it" in output.error[1]
    assert kernel.run(f"%%accelerate --cpus 2\n{LOOP}").stdout == "ended\n"


def test_a_torch_xla_of_another_torch_is_named_with_the_right_one(kernel: Kernel, load: Output, folder: Path):
    place = folder / "site packages"
    (place / "torch_xla").mkdir()
    (place / "torch_xla" / "__init__.py").touch()
    facts = place / "torch_xla-2.9.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_xla\nVersion: 2.9.0\n")
    assert kernel.run("import importlib\nimportlib.invalidate_caches()").error is None
    output = kernel.run("%%accelerate --cpus 2 --strategy xla\n1")
    assert output.error is not None
    assert f"torch_xla 2.9.0 runs with torch 2.9 only, and torch {OLD['torch']} is installed: " in output.error[1]
    assert kernel.value("1 + 1") == 2


@pytest.mark.nightly
@pytest.mark.skipif(
    subprocess.run([*SANDBOX, "ip", "link"], capture_output=True).returncode != 0,
    reason="namespaces of networks are not allowed here, or `ip` is missing",
)
def test_without_loopback_workers_are_refused_and_its_name_and_dev_shm_do_not_matter(tmp_path: Path):
    command = [*SANDBOX, sys.executable, "-c", IN_SANDBOX]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    errors = [line for line in done.stdout.splitlines() if line.startswith("error: ")]
    assert errors[:1] + errors[3:] == ["error: None"] * 3, done.stdout + done.stderr
    assert errors[1].startswith("error: PoolError: no network interface has the address 127.0.0.1, and workers of one ")
    assert "`ip link set lo up` switches it on" in errors[1]
    assert errors[2].startswith("error: PoolError: the network interface own0 is down, and workers of one machine ")
    assert "2 100000.0" in done.stdout.splitlines()
    assert "/dev/shm has 0 MiB: accel_nb does not use it, but DataLoader workers do" in done.stdout


def test_a_system_without_fork_or_memory_files_is_named_and_nothing_is_loaded(tmp_path: Path):
    done = subprocess.run([sys.executable, "-c", OTHER_SYSTEM], cwd=tmp_path, capture_output=True, text=True)
    assert "2 False" in done.stdout
    [line] = [line for line in (done.stdout + done.stderr).splitlines() if "PoolError" in line]
    assert "which Windows lacks: run Jupyter in WSL" in line
