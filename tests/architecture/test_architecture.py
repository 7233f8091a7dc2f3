"""Rules about the code as a whole: who imports what, who may name what, what is never called."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.sources import FILES, PACKAGE, dotted, nodes_of

KERNEL_SIDE = [
    "accel_nb",
    "accel_nb.config",
    "accel_nb.telemetry.events",
    "accel_nb.telemetry.ring",
    "accel_nb.runtime.devices.cuda",
    "accel_nb.runtime.devices.registry",
    "accel_nb.runtime.devices.xla",
    "accel_nb.runtime.process.environment",
    "accel_nb.runtime.process.hardware",
    "accel_nb.forecast.header",
    "accel_nb.forecast.plans",
    "accel_nb.forecast.request",
    "accel_nb.forecast.table",
    "accel_nb.pool.local.engine",
    "accel_nb.pool.pool",
    "accel_nb.pool.sync.change_detection",
    "accel_nb.pool.sync.paths.object_paths",
    "accel_nb.pool.sync.namespace_sync",
    "accel_nb.pool.sync.shared_object_registry",
    "accel_nb.pool.sync.result_transfer",
    "accel_nb.notebook.magics",
    "accel_nb.ui",
    "accel_nb.cli",
    "accel_nb.launch.job",
    "accel_nb.launch.rank",
]


def mentions(path: Path, name: str) -> bool:
    """Whether a module imports ``name`` or something below it, at any depth of nesting."""
    text = path.read_text()
    if name.rpartition(".")[2] not in text:
        return False
    for node in nodes_of(path):
        if isinstance(node, ast.Import) and any((a.name + ".").startswith(name + ".") for a in node.names):
            return True
        if isinstance(node, ast.ImportFrom) and ((node.module or "") + ".").startswith(name + "."):
            return True
        if isinstance(node, ast.Attribute) and dotted(node).startswith(name):
            return True
    return False


def test_the_kernel_side_imports_without_torch():
    code = f"""
import importlib, sys
for module in {KERNEL_SIDE}:
    importlib.import_module(module)
    assert "torch" not in sys.modules, module
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_torch_distributed_is_named_in_its_layers_only():
    allowed = {
        "runtime",
        "strategies",
        "checkpoint",
        "compat",
    }  # accelerate's names include torch's meshes and wrappers
    wrong = [p for p in FILES if mentions(p, "torch.distributed") and p.relative_to(PACKAGE).parts[0] not in allowed]
    assert wrong == []


def test_torch_xla_is_known_to_its_strategy_and_its_device_only():
    known = [path.relative_to(PACKAGE).as_posix() for path in FILES if mentions(path, "torch_xla")]
    assert known == ["runtime/devices/xla.py", "strategies/xla.py"]


def test_types_of_device_are_distinguished_behind_their_seam_only():
    wrong = [
        f"{path.relative_to(PACKAGE).as_posix()}:{node.lineno}: {ast.unparse(node)}"
        for path in FILES
        if not {PACKAGE / "runtime" / "devices", PACKAGE / "compat"} & {*path.parents}  # the alias answers by type
        for node in nodes_of(path)
        if names_device_type(node)
    ]
    assert wrong == []


def test_new_tensors_do_not_depend_on_the_default_device():
    wrong = [
        f"{path.relative_to(PACKAGE).as_posix()}:{call.lineno}: {ast.unparse(call)}"
        for path in FILES
        for call in factory_calls(nodes_of(path))
        if {"device", "generator", None}.isdisjoint(keyword.arg for keyword in call.keywords)
    ]
    assert wrong == []


def factory_calls(nodes: list[ast.AST]) -> list[ast.Call]:
    """Return the calls that make tensors, without draws: samplers draw on the default device, as those of torch do."""
    drawn = {node.value for node in nodes if isinstance(node, ast.Attribute) and node.attr == "random_"}
    calls = [node for node in nodes if isinstance(node, ast.Call) and dotted(node.func) in _FACTORIES]
    return [call for call in calls if call not in drawn]


_FACTORIES = {
    f"torch.{name}"
    for name in (
        "arange", "as_tensor", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm",
        "tensor", "zeros",
    )
}  # fmt: skip


_DEVICE_NAMES = {"cpu", "cuda", "xla", "xpu", "mps", "meta"}


def names_device_type(node: ast.AST) -> bool:
    """Whether an expression compares the type of a device, or calls what torch has for one type only.

    ``tensor.is_cpu`` and ``tensor.is_meta`` say where content is, and may be asked anywhere.
    """
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        has_type = any(isinstance(side, ast.Attribute) and side.attr in ("type", "device_type") for side in sides)
        if not has_type:
            return False
        words = {part.value for side in sides for part in ast.walk(side) if isinstance(part, ast.Constant)}
        is_of_device = any(".device" in f".{ast.unparse(side)}" for side in sides)
        return is_of_device or not words.isdisjoint(_DEVICE_NAMES)
    if isinstance(node, ast.Attribute):
        is_of_torch = isinstance(node.value, ast.Name) and node.value.id == "torch"
        return node.attr in ("is_cuda", "is_xla", "is_xpu", "is_mps") or (
            is_of_torch and node.attr in ("cuda", "xpu", "mps", "accelerator", "get_device_module")
        )
    return False


def test_only_one_module_reads_the_environment():
    wrong = [p for p in FILES if mentions(p, "os.environ") or mentions(p, "os.getenv")]
    assert [path.relative_to(PACKAGE).as_posix() for path in wrong] == ["runtime/process/environment.py"]


@pytest.mark.parametrize("name", ["ddp", "single"])
def test_a_strategy_is_named_in_its_own_file_and_the_schema_only(name):
    words = [
        path.relative_to(PACKAGE).as_posix()
        for path in FILES
        for node in nodes_of(path)
        if isinstance(node, ast.Constant) and node.value == name
    ]
    # Plans are made without torch, from a table of how each strategy divides memory:
    # docs/decisions/0075-plan-preference.md.
    assert set(words) <= {
        f"strategies/{name}.py",
        f"strategies/{name}/strategy.py",
        "config/schema.py",
        "forecast/layouts.py",
    }


def test_no_module_is_named_after_nothing():
    assert [p for p in FILES if p.stem in ("utils", "helpers", "common", "misc")] == []


def test_no_test_module_imports_another_one():
    tests = Path(__file__).parents[1]
    assert [
        str(path.relative_to(tests))
        for path in sorted(tests.rglob("*.py"))
        if re.search(r"^(from|import) tests\.(\w+\.)*test_", path.read_text(), re.MULTILINE)
    ] == []


def test_the_panel_and_the_sidebar_share_no_class():
    sources = Path(__file__).parents[2] / "labextension"
    panel = class_names([sources / "src/widget/widget.css"])
    sidebar = class_names(sorted((sources / "style").glob("*.css")))
    assert panel
    assert sidebar
    assert panel & sidebar == set(), "both stylesheets are on one page: a class of both is styled by either"


def class_names(paths: list[Path]) -> set[str]:
    return {name for path in paths for name in re.findall(r"\.(accel-nb-[a-z-]+)", path.read_text())}


def test_the_benchmark_and_the_check_of_the_wheel_agree_on_the_size_of_the_bundle():
    root = PACKAGE.parent
    [checked] = re.findall(r"assert size <= ([\d_]+)", (root / ".ci/check_wheel.sh").read_text())
    [measured] = re.findall(
        r'Figure\("widget bundle", .*, (\d+), "kB"\)', (root / "benchmarks/panel_scale.py").read_text()
    )
    assert int(measured) * 1000 == int(checked)
