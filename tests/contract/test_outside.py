"""The strategy of the guide, installed by another package, passes the suite that finds it by itself."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(300)
def test_a_strategy_of_another_package_passes_the_suite(tmp_path: Path) -> None:
    guide = (ROOT / "docs" / "add_a_strategy.md").read_text()
    code = re.search(r"```python\n(.*?)```", guide, re.DOTALL)
    points = re.search(r'```toml\n\[project.entry-points."(.*?)"\]\nsimple = "(.*?)"\n```', guide)
    assert code is not None
    assert points is not None
    module, _, _ = points[2].partition(":")
    package = tmp_path / module.partition(".")[0]
    package.mkdir()
    (package / "__init__.py").touch()
    (tmp_path / (module.replace(".", "/") + ".py")).write_text(code[1])
    facts = tmp_path / "my_package-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: my_package\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(f"[{points[1]}]\nsimple = {points[2]}\n")

    paths = [str(ROOT), str(tmp_path), os.environ.get("PYTHONPATH", "")]
    suite = ["tests/contract/test_strategy.py", "tests/contract/test_windows.py", "tests/contract/test_losses.py"]
    outcome = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "simple", *suite],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert outcome.returncode == 0, outcome.stdout[-4000:]
    passed = re.search(r"(\d+) passed", outcome.stdout)
    assert passed is not None
    assert int(passed[1]) > 12  # the suite has found it
