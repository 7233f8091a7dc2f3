"""Pipeline parallelism for inference: one stage of a model per rank, batches in micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from accel_nb.bigmodel.planning.module_tree import ModuleTree
from accel_nb.bigmodel.planning.sizes import find_blocks, list_tensors
from accel_nb.errors import ConfigError, MisuseError
from accel_nb.runtime.distributed.collectives import Collectives
from accel_nb.runtime.distributed.communicator import Communicator
from accel_nb.runtime.distributed.current_world import current_comm
from accel_nb.runtime.distributed.pipeline_stages import Stages
from accel_nb.runtime.tensors.nested import concat_batches, first_batch_size, map_tensors, slice_batch, to_device


def prepare_pipeline(
    model: nn.Module,
    split_points: Sequence[str] | str = "auto",
    no_split_module_classes: Sequence[str] | str | None = None,
    example_args: tuple[Any, ...] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    num_chunks: int | None = None,
    gather_output: bool = False,
) -> nn.Module:
    """Divide a model into one stage per rank, for inference in micro-batches; return the same model.

    Every rank must call it, and then the model. ``split_points`` names the modules that start a stage, one less than
    ranks; ``auto`` cuts before blocks (``no_split_module_classes``; None: those that the model repeats) so that stages
    have about the same size. The examples are a whole batch, which is divided into ``num_chunks`` micro-batches (None:
    as many as ranks); batches of other sizes are padded, or processed in several rounds. Rank 0's inputs are used. The
    last rank returns the output, the others None, unless ``gather_output``. With one rank the model is unchanged.

    torch must be able to trace the model. Raises `ConfigError` or `MisuseError` on every rank.
    """
    comm = current_comm()
    world = comm.world
    if world.size == 1:
        return model
    size = first_batch_size((example_args, example_kwargs))
    chunks = world.size if num_chunks is None else num_chunks
    if type(chunks) is not int or chunks < 1:
        raise ConfigError(f"num_chunks is {num_chunks!r}; give a whole number from 1")
    if not size:
        raise ConfigError(
            "example_args and example_kwargs have no tensor: give the arguments of a call with a whole batch"
        )
    points = _split_points(model, split_points, no_split_module_classes, world.size)
    rows = -(-size // chunks)
    args, kwargs = to_device(slice_batch((example_args, dict(example_kwargs or {})), 0, rows), "cpu")
    stages = Stages(model, world, points, args, kwargs, chunks)
    model.forward = _Forward(stages, comm, rows, chunks, gather_output)
    return model


class _Forward:
    """The forward of a model in stages."""

    def __init__(self, stages: Stages, comm: Communicator, rows: int, num_chunks: int, gathers: bool) -> None:
        self.stages = stages
        self._comm = comm
        self._round = rows * num_chunks
        self._gathers = gathers

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute a batch in rounds of the size that the stages were built for."""
        world = self._comm.world
        size = self._comm.broadcast_json(first_batch_size((args, kwargs)))
        if not size:
            raise MisuseError("the arguments of rank 0 for the pipeline have no tensor with samples")
        outputs: list[Any] = []
        for begin in range(0, size, self._round):
            end = min(size, begin + self._round)
            part: Any = ((), {})
            if world.rank == 0:
                part = to_device(_padded(slice_batch((args, kwargs), begin, end), self._round), world.device)
            output = self.stages.run(*part)
            if world.rank == world.size - 1:
                outputs.append(slice_batch(output, 0, end - begin))
        joined = concat_batches(outputs) if outputs else None
        if not self._gathers:
            return joined
        return to_device(Collectives(self._comm).broadcast_object(joined, world.size - 1), world.device)


def _padded(batch: Any, size: int) -> Any:
    """Return a batch with its last sample repeated up to a size."""
    have = first_batch_size(batch)
    if have is None or have == size:
        return batch

    def fill(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.dim() or len(tensor) != have:
            return tensor
        return torch.cat([tensor, tensor[-1:].expand(size - have, *tensor.shape[1:])])

    return map_tensors(fill, batch)


def _split_points(
    model: nn.Module, given: Sequence[str] | str, no_split: Sequence[str] | str | None, num_stages: int
) -> list[str]:
    if given != "auto":
        points = [given] if isinstance(given, str) else list(given)
        names = {name for name, _ in model.named_modules()}
        problems = [
            f"split_points names {point!r}, which is not a module of the model"
            for point in points
            if point not in names
        ]
        if len(points) != num_stages - 1:
            problems.append(f"split_points has {len(points)} names; {num_stages} ranks need {num_stages - 1}")
        if problems:
            raise ConfigError(problems)
        return points
    blocks = [no_split] if isinstance(no_split, str) else list(no_split or find_blocks(model))
    tree = ModuleTree(model, list_tensors(model), blocks)
    parts = [part for part in tree.leaf_parts("") if part in tree.modules]
    sizes = [tree.nbytes(tree.tensor_indices(part)) for part in parts]
    before = list(accumulate(sizes, initial=0))[:-1]
    total = sum(sizes)
    starts = [
        min(range(1, len(parts)), key=lambda at: abs(before[at] - total * stage / num_stages), default=0)
        for stage in range(1, num_stages)
    ]
    if len({0, *starts}) != num_stages:
        raise ConfigError(
            f"the model's parts are too few or too large for {num_stages} stages of about equal size; give split_points"
        )
    return [parts[at] for at in starts]
