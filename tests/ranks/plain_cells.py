"""Plain cells without a notebook."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import torch

from accel_nb.accelerator import Accelerator
from accel_nb.accelerator.plain_cells.autoprepare import PlainCells
from accel_nb.runtime.world import World


@contextmanager
def plain_cells(world: World) -> Any:
    torch.manual_seed(100 + world.rank)
    accelerator = Accelerator(world=world, cpu=True)
    cells = PlainCells(accelerator)
    with cells.run_cell():
        yield cells
    accelerator.close()
