"""The strategy of the guide, installed by another package, passes the suite that finds it by itself."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


USE_OPTIONS = """
import json, sys
from pathlib import Path

{first_import}
from accel_nb.config import Layer, environment_layer, parse_flags, read_file, resolve
from accel_nb.config.schema import OPTIONS, json_schema
from accel_nb.errors import ConfigError

flags = resolve([parse_flags("--strategy simple --simple.in-double")])
Path("train.yaml").write_text("simple:\\n  in_double: true\\n")
problems = []
for line in ("--simple.in-double=3", "--simple.in-doubel"):
    try:
        resolve([parse_flags(line)])
    except ConfigError as error:
        problems += error.problems
try:
    resolve([Layer("code", {{"simple": {{"in_double": "perhaps"}}}}, "Accelerator(...)")])
except ConfigError as error:
    problems += error.problems
schema = json_schema()
print(json.dumps({{
    "flags": flags.config.simple.in_double,
    "again": type(flags).from_json(flags.to_json()).config.simple.in_double,
    "file": resolve([read_file("train.yaml")]).config.simple.in_double,
    "variable": resolve([environment_layer({{"ACCEL_NB_SIMPLE__IN_DOUBLE": "yes"}})]).config.simple.in_double,
    "idle": resolve([parse_flags("--strategy ddp --simple.in-double")]).notes,
    "schema": schema["$defs"]["SimpleOptions"]["properties"]["in_double"]["type"],
    "allowed": OPTIONS["simple.in_double"].allowed,
    "problems": problems,
    "has_torch": "torch" in sys.modules,
}}))
"""


def install_guide(folder: Path) -> dict[str, str]:
    """Lay out the package of the guide, as pip would install it; returns the variables that a process finds it with."""
    guide = (ROOT / "docs" / "add_a_strategy.md").read_text()
    code = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    points = dict(re.findall(r'```toml\n\[project.entry-points."(.*?)"\]\nsimple = "(.*?)"\n```', guide))
    assert points.keys() == {"accel_nb.strategies", "accel_nb.options"}
    package = folder / "my_package"
    package.mkdir()
    (package / "__init__.py").touch()
    for text, point in zip(code, (points["accel_nb.strategies"], points["accel_nb.options"]), strict=True):
        (folder / (point.partition(":")[0].replace(".", "/") + ".py")).write_text(text)
    facts = folder / "my_package-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: my_package\nVersion: 1.0\n")
    entries = [f"[{group}]\nsimple = {point}\n" for group, point in points.items()]
    (facts / "entry_points.txt").write_text("\n".join(entries))
    paths = [str(ROOT), str(folder), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


@pytest.mark.parametrize("first_import", ["", "import my_package.options"])
def test_options_of_another_package_are_checked_like_built_in_ones(tmp_path: Path, first_import: str) -> None:
    command = [sys.executable, "-W", "error", "-c", USE_OPTIONS.format(first_import=first_import)]
    done = subprocess.run(command, cwd=tmp_path, env=install_guide(tmp_path), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["flags"] is seen["again"] is seen["file"] is seen["variable"] is True
    assert seen["schema"] == "boolean"
    assert seen["allowed"] == "true or false"
    assert seen["has_torch"] is False
    assert "it belongs to simple, and strategy is ddp" in seen["idle"][0]
    taken, unknown, refused = seen["problems"]
    assert "the flag takes no value" in taken
    assert "did you mean --simple.in-double?" in unknown
    assert "perhaps from Accelerator(...) (code) is not allowed; give true or false" in refused


def test_options_that_cannot_be_imported_are_left_out_with_a_warning(tmp_path: Path) -> None:
    env = install_guide(tmp_path)
    (tmp_path / "my_package" / "options.py").write_text("import a_module_that_is_not_there\n")
    code = "from accel_nb.config import OPTIONS; print([name for name in OPTIONS if name.startswith('simple')])"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert "the options of strategy 'simple' (my_package.options:SimpleOptions) are left out" in done.stderr


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_a_strategy_of_another_package_passes_the_suite(tmp_path: Path) -> None:
    suite = ["tests/contract/test_strategy.py", "tests/contract/test_windows.py", "tests/contract/test_losses.py"]
    outcome = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "simple", *suite],
        cwd=ROOT,
        env=install_guide(tmp_path),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert outcome.returncode == 0, outcome.stdout[-4000:]
    passed = re.search(r"(\d+) passed", outcome.stdout)
    assert passed is not None
    assert int(passed[1]) > 12  # the suite has found it
