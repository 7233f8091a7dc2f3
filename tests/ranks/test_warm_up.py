"""The cell that the zygote runs before it forks workers."""

from __future__ import annotations

from typing import Any

from accel_nb.runtime.world import World
from tests.ranks.launch import run_ranks


def warm_up(world: World) -> tuple[str, Any]:
    from accel_nb.notebook.worker.program import warm

    result = warm()
    return result.outcome, result.body["error"]


def test_it_runs_to_its_end():
    assert run_ranks(warm_up, 1) == [("done", None)]
