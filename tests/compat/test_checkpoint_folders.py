"""Checkpoints that are named and counted automatically."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from accel_nb.checkpoint.store import LocalStore
from accel_nb.checkpoint.store_url import open_store
from accel_nb.compat.accelerator import Accelerator
from accel_nb.compat.plugins import ProjectConfiguration
from accel_nb.errors import CheckpointError
from accel_nb.runtime.process.environment import set_rank_variables
from accel_nb.runtime.world import World
from tests.ranks.launch import run_ranks


def prepared(folder: Path, **options: Any) -> Accelerator:
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=True, **options)
    accelerator = Accelerator(cpu=True, project_config=project)
    accelerator.prepare(nn.Linear(1, 1))
    return accelerator


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir() if path.is_dir())


def test_a_project_may_be_a_url(tmp_path: Path) -> None:
    url: Any = f"memory://{tmp_path.name}"
    accelerator = prepared(url, total_limit=2)
    for number in range(3):
        assert accelerator.save_state() == f"{url}/checkpoints/checkpoint_{number}"
    assert sorted(open_store(f"{url}/checkpoints").folders()) == ["checkpoint_1", "checkpoint_2"]
    assert accelerator.load_state().url == f"{url}/checkpoints/checkpoint_2"
    assert accelerator.load_state(f"{url}/checkpoints/checkpoint_1").url.endswith("checkpoint_1")


class Unsaved:
    def state_dict(self) -> dict[str, Any]:
        raise OSError("No space left on device")

    def load_state_dict(self, state: object) -> None:
        raise AssertionError("nothing is loaded")


def test_a_save_that_fails_removes_no_older_checkpoint(tmp_path: Path) -> None:
    accelerator = prepared(tmp_path, total_limit=1)
    accelerator.save_state()
    accelerator.register_for_checkpointing(Unsaved())
    with pytest.raises(OSError, match="No space left"):
        accelerator.save_state()
    assert names(tmp_path) == ["checkpoint_0"]


@pytest.mark.parametrize("limit", [0, 1, 2])
def test_the_oldest_beyond_the_limit_are_removed(tmp_path: Path, limit: int) -> None:
    accelerator = prepared(tmp_path, total_limit=limit)
    for number in range(12):
        accelerator.save_state()
        assert names(tmp_path)[-1].startswith("checkpoint_")
        assert (tmp_path / "checkpoints" / f"checkpoint_{number}").is_dir()
    assert names(tmp_path) == ["checkpoint_10", "checkpoint_11"][-max(limit, 1) :]


def test_the_one_that_was_saved_last_stays_whatever_its_number(tmp_path: Path) -> None:
    prepared(tmp_path, iteration=5).save_state()
    prepared(tmp_path, total_limit=1).save_state()
    assert names(tmp_path) == ["checkpoint_0"]
    with pytest.raises(ValueError, match="exists: another run"):
        prepared(tmp_path).save_state()


def test_one_that_is_still_written_does_not_count(tmp_path: Path) -> None:
    accelerator = prepared(tmp_path, total_limit=1)
    for _ in range(3):
        accelerator.save_state(blocking=False)
        assert len(names(tmp_path)) >= 1
    accelerator.wait_for_checkpoint()
    accelerator.save_state()
    assert names(tmp_path) == ["checkpoint_3"]


def save_where_nothing_can_be_removed(world: World, folder: Path) -> str:
    """Save twice on each rank, with a limit of one; the first process cannot remove the older checkpoint."""
    set_rank_variables(world)
    accelerator = prepared(folder, total_limit=1)
    accelerator.save_state()
    LocalStore.remove = _fail
    try:
        accelerator.save_state()
    except (OSError, CheckpointError) as error:
        return str(error)
    return "saved"


def _fail(self: LocalStore, name: str) -> None:
    raise PermissionError(13, "Permission denied")


def test_an_error_of_the_removal_is_raised_on_every_rank(tmp_path: Path) -> None:
    for found in run_ranks(save_where_nothing_can_be_removed, 2, tmp_path, timeout_s=60):
        assert "Permission denied" in found
