"""What is generated from the schema is up to date, and the schema costs the kernel little."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

from accel_nb.config import export as option_files
from accel_nb.config.export import generated_files, json_schema, run_command, stale_files, write_generated
from accel_nb.config.schema import OPTIONS
from accel_nb.telemetry.actions import Action
from accel_nb.ui import export as message_files
from tests.environments import table as environment_files

ROOT = Path(__file__).parents[2]
GENERATORS = [option_files, message_files, environment_files]


@pytest.mark.parametrize("generator", GENERATORS)
def test_generated_files_are_up_to_date(generator: Any):
    assert stale_files(ROOT, generator.generated_files()) == [], f"run: {generator.COMMAND}"


@pytest.mark.parametrize("generator", GENERATORS)
def test_check_finds_drift(tmp_path: Path, generator: Any):
    (tmp_path / "pyproject.toml").touch()
    files = generator.generated_files()

    def run(*arguments: str) -> int:
        return run_command(arguments, generator.COMMAND, files)

    assert sorted(write_generated(tmp_path, files)) == sorted(files)
    assert run("--check", str(tmp_path)) == 0
    (tmp_path / next(iter(files))).write_text("edited by hand")
    assert run("--check", str(tmp_path)) == 1
    assert run(str(tmp_path)) == 0
    assert run("--check", str(tmp_path)) == 0
    assert run("--chek") == 2


def test_the_front_end_has_a_type_of_each_action():
    text = message_files.messages_typescript()
    for action in get_args(Action):
        assert f"export interface I{action.__name__} {{\n  readonly kind: '{action.kind}';" in text


def test_schema_describes_every_option_with_unit_and_limits():
    schema = json.loads(generated_files()["labextension/src/generated/options.schema.json"])
    assert schema["$schema"].endswith("2020-12/schema")
    assert schema["properties"]["gpus"]["anyOf"][0] == {"maximum": 1024, "minimum": 1, "type": "integer"}
    assert schema["properties"]["timeout"]["unit"] == "seconds"
    assert schema["properties"]["strategy"]["enum"][0] == "auto"
    assert schema["additionalProperties"] is False
    for option in OPTIONS.values():
        assert f"`{option.name}`" in generated_files()["docs/options.md"]
        assert option.name in generated_files()["labextension/src/generated/options.ts"]
    assert json_schema() is json_schema()


def test_config_imports_without_torch_and_loads_parsers_on_use():
    script = """
import os, sys
before = dict(os.environ)
import accel_nb.config as config
heavy = {"torch", "numpy", "yaml", "pydantic_settings", "argparse", "IPython"} & set(sys.modules)
assert not heavy, heavy
config.resolve([config.parse_flags("--gpus 2 --precision bf16"), config.environment_layer({"ACCEL_NB_SEED": "1"})])
assert "torch" not in sys.modules and "yaml" not in sys.modules
assert dict(os.environ) == before
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "ACCEL_NB_GPUS": "0"}  # the package itself never reads it
    subprocess.run([sys.executable, "-c", script], check=True, env=environment, cwd=ROOT, timeout=60)


def test_environment_is_read_nowhere_in_config():
    for path in (ROOT / "accel_nb/config").glob("*.py"):
        assert "os.environ" not in path.read_text(), path
