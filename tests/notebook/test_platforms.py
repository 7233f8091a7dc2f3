"""Platforms built around a real kernel: its variables, modules, names and home folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.kernel import running_kernel

WHERE = """
import sys
from accel_nb.runtime.platforms import detect_platform
from accel_nb.ui.fallback import find_display_facts, choose_rung
"""
COLAB = (
    "import types\ngoogle = types.ModuleType('google')\nsys.modules['google.colab'] = types.ModuleType('google.colab')"
)

pytestmark = pytest.mark.usefixtures("kernel")  # the first kernel of a process leaves an event loop in it


@pytest.mark.parametrize(
    ("variables", "code", "name"),
    [
        ({"KAGGLE_KERNEL_RUN_TYPE": "Interactive", "COLAB_RELEASE_TAG": "r"}, "", "kaggle"),
        ({"COLAB_RELEASE_TAG": "release-colab"}, COLAB, "colab"),
        ({}, COLAB, "colab"),
        ({"DEEPNOTE_PROJECT_ID": "1"}, "", "deepnote"),
        ({"PAPERSPACE_NOTEBOOK_REPO_ID": "1"}, "", "paperspace"),
        ({"HOME": "/home/studio-lab-user"}, "", "studiolab"),
        ({"SAGEMAKER_INTERNAL_IMAGE_URI": "1"}, "", "sagemaker"),
        ({"DATABRICKS_RUNTIME_VERSION": "16"}, "", "databricks"),
        ({"VSCODE_PID": "1"}, "", "vscode"),
        ({}, "__vsc_ipynb_file__ = 'x.ipynb'", "vscode"),
        ({}, "", "jupyter"),
    ],
)
def test_a_kernel_knows_where_it_runs(
    variables: dict[str, str], code: str, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    for variable, value in ({"IPYTHONDIR": str(tmp_path)} | variables).items():
        monkeypatch.setenv(variable, value)
    if "HOME" in variables:
        monkeypatch.setenv("JUPYTER_DATA_DIR", os.fspath(tmp_path))
    with running_kernel() as kernel:
        assert kernel.run(WHERE + code).error is None
        assert kernel.value("detect_platform().name") == name
        rung = kernel.value("choose_rung(find_display_facts(), 'live')")
        assert rung == ("picture" if name in ("kaggle", "deepnote", "studiolab", "databricks") else "widget")
        assert kernel.value("'torch' in sys.modules") is False
