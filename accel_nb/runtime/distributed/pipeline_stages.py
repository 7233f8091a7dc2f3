"""Pipeline stages of a model, one on each rank, by `torch.distributed.pipelining`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, pipeline

from accel_nb.errors import MisuseError
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
