"""Pipeline stages of a model, one on each rank, by `torch.distributed.pipelining`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, pipeline

from accel_nb.errors import MisuseError
from accel_nb.runtime.torch_private import torch_version
from accel_nb.runtime.world import World


class Stages:
    """This rank's stage of a traced model, and the schedule that sends micro-batches through all stages.

    Every rank must build it, with the same model and examples (one micro-batch), and must call `run`. ``split_points``
    are the names of modules that start a stage, one fewer than there are ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        world: World,
        split_points: Sequence[str],
        example_args: tuple[Any, ...],
        example_kwargs: Mapping[str, Any],
        num_chunks: int,
    ) -> None:
        problem = why_no_stages(world.size, num_chunks, dist.get_backend())  # pyright: ignore[reportPrivateImportUsage]
        if problem is not None:
            raise MisuseError(problem)
        self._world = world
        device = torch.device(world.device)
        with torch.no_grad():
            traced = pipeline(
                model,
                mb_args=example_args,
                mb_kwargs=dict(example_kwargs),
                split_spec=dict.fromkeys(split_points, SplitPoint.BEGINNING),
            )
        if traced.num_stages != world.size:
            raise MisuseError(
                f"{len(split_points)} split points make {traced.num_stages} stages for {world.size} ranks"
            )
        self.module: nn.Module = traced.get_stage_module(world.rank).to(device)
        self._schedule = ScheduleGPipe(traced.build_stage(world.rank, device, dist.group.WORLD), num_chunks)

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Send a batch through all stages without gradients; return the output on the last rank, None on others."""
        with torch.no_grad():
            if self._world.rank == 0:
                self._schedule.step(*args, **kwargs)
                return None
            return self._schedule.step()


def why_no_stages(num_stages: int, num_chunks: int, backend: str) -> str | None:
    """Return why the installed version of torch cannot run such a pipeline; None if it can."""
    version = torch_version()
    if version == "2.9" and backend == "gloo":
        return "torch 2.9 cannot run the stages of a pipeline on CPUs: install torch 2.10 or newer, or use GPUs"
    if version in ("2.9", "2.10") and num_chunks < num_stages:
        return (
            f"torch {version} takes at least as many micro-batches as stages, and num_chunks is {num_chunks} for "
            f"{num_stages} stages: raise num_chunks, or install torch 2.11 or newer"
        )
    return None
