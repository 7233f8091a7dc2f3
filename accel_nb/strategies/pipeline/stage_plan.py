"""Choice of the blocks of a model that each stage computes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from accel_nb.runtime.tensors.instance_patching import innermost_class
from accel_nb.runtime.tensors.module_paths import submodule_at
from accel_nb.strategies.base import Refusal
from accel_nb.strategies.block_calls import CallHooks, inside

HOOKED = (
    "hooks inside of a {kind} would be called on one worker only, for each micro-batch: remove them before the model "
    "is trained, or train with --pp 1"
)


@dataclass(frozen=True)
class StagePlan:
    """The names of a model's blocks in the order of computation, and the number of the first one of each stage.

    Rank ``s % num_ranks`` computes stage ``s``, so that a rank may have several stages (interleaved ones).
    ``is_whole``: the model is an `nn.Sequential` that consists of the blocks only.
    """

    blocks: tuple[str, ...]
    starts: tuple[int, ...]
    num_ranks: int
    is_whole: bool = False

    def rank_of(self, number: int) -> int:
        """Return the rank that computes a block."""
        return (sum(start <= number for start in self.starts) - 1) % self.num_ranks

    def range_of(self, stage: int) -> range:
        """Return the numbers of a stage's blocks."""
        stops = (*self.starts[1:], len(self.blocks))
        return range(self.starts[stage], stops[stage])

    def describe(self) -> str:
        """Return the number of blocks in each stage, as text."""
        counts = [str(len(self.range_of(stage))) for stage in range(len(self.starts))]
        return f"stages of {', '.join(counts[:-1])} and {counts[-1]} blocks"


def plan_stages(
    model: nn.Module,
    num_ranks: int,
    split_points: Sequence[str] = (),
    *,
    stages_per_rank: int = 1,
    is_in_micro_batches: bool = True,
) -> StagePlan | Refusal:
    """Return the plan of the blocks that each of ``num_ranks`` ranks computes, or the reason why there is none.

    ``is_in_micro_batches``: batches pass through the stages in several micro-batches.
    """
    kind = innermost_class(model).__name__
    name, blocks = _find_blocks(model)
    num_stages = num_ranks * stages_per_rank
    if len(blocks) < num_stages:
        found = f"has {len(blocks)} blocks in {name or 'itself'}" if blocks else "has no list of blocks"
        stages = f"mesh.pp {num_ranks}"
        if stages_per_rank > 1:
            stages += f" with mesh.stages_per_rank {stages_per_rank}"
        return Refusal(
            f"{stages} needs at least {num_stages} blocks of one class in an nn.ModuleList or "
            f"nn.Sequential, and {kind} {found}",
            f"use mesh.pp {len(blocks) // stages_per_rank} or less"
            if len(blocks) >= 2 * stages_per_rank
            else "train with --pp 1",
        )
    if (is_in_micro_batches or stages_per_rank > 1) and any(isinstance(part, _BatchNorm) for part in model.modules()):
        return Refusal(
            f"{kind} has batch normalization, whose statistics would be those of micro-batches or of several stages",
            "set mesh.micro_batches and mesh.stages_per_rank to 1, or use layers that normalize each sample",
        )
    if CallHooks(inside(model), includes_library_hooks=True).exist():
        reason, _, remedy = HOOKED.partition(": ")
        return Refusal(reason.format(kind=kind), remedy)
    owner = submodule_at(model, name)
    places = Counter(id(part) for leaf, part in owner.named_modules(remove_duplicate=False) if "." not in leaf)
    twice = next((part for part in owner.children() if places[id(part)] > 1), None)
    if twice is not None:
        return Refusal(
            f"{kind} has one {innermost_class(twice).__name__} at several places of {name or 'itself'}, and a stage "
            "would not know at which it is called",
            "make a module for each place, or train with --pp 1",
        )
    names = tuple(f"{name}.{leaf}" if name else leaf for leaf in blocks)
    if split_points:
        starts = _starts_at(names, num_stages, split_points)
        if isinstance(starts, Refusal):
            return starts
    else:
        sizes = [1 + sum(value.numel() for value in submodule_at(model, block).parameters()) for block in names]
        starts = balance(sizes, num_stages)
    return StagePlan(names, starts, num_ranks, is_whole=not name)


def balance(sizes: Sequence[int], num_stages: int) -> tuple[int, ...]:
    """Return the first index of each stage, so that the largest sum of a stage's sizes is as small as possible."""
    low, high = max(sizes), sum(sizes)
    while low < high:
        limit = (low + high) // 2
        if len(_fill(sizes, limit, num_stages)) <= num_stages:
            high = limit
        else:
            low = limit + 1
    return _fill(sizes, low, num_stages)


def _fill(sizes: Sequence[int], limit: int, num_stages: int) -> tuple[int, ...]:
    """Return the starts of stages whose sums do not exceed ``limit``; at least ``num_stages`` if possible."""
    starts, total = [0], 0
    for number, size in enumerate(sizes):
        is_needed = len(sizes) - number <= num_stages - len(starts)
        if number and (total + size > limit or is_needed):
            starts.append(number)
            total = 0
        total += size
    return tuple(starts)


def _find_blocks(model: nn.Module) -> tuple[str, list[str]]:
    """Return the list of blocks with the most parameters: its name, and the names of the blocks in it.

    A model that is an `nn.Sequential` consists of blocks of any class; elsewhere they are of one class.
    """
    if innermost_class(model) is nn.Sequential and len(list(model.children())) > 1:
        return "", [name for name, _ in model.named_children()]
    best: tuple[int, str, list[str]] = (0, "", [])
    for name, part in model.named_modules():
        if not isinstance(part, nn.ModuleList | nn.Sequential) or not name:
            continue
        children = dict(part.named_children())
        kinds = Counter(innermost_class(child) for child in children.values())
        if len(kinds) != 1 or len(children) < 2:
            continue
        size = sum(value.numel() for value in part.parameters())
        if size > best[0]:
            best = (size, name, list(children))
    return best[1], best[2]


def _starts_at(names: Sequence[str], num_stages: int, split_points: Sequence[str]) -> tuple[int, ...] | Refusal:
    unknown = next((point for point in split_points if point not in names[1:]), None)
    if unknown is not None:
        return Refusal(
            f"mesh.split_points names {unknown}, with which no stage can begin",
            f"use {num_stages - 1} of {', '.join(names[1:4])}{' and so on' if len(names) > 4 else ''}",
        )
    if len(split_points) != num_stages - 1:
        return Refusal(
            f"mesh.split_points has {len(split_points)} names, and {num_stages} stages take {num_stages - 1}",
            "name the first block of the second and of each later stage",
        )
    return (0, *sorted(names.index(point) for point in split_points))


def staged_parameters(model: nn.Module, stages: StagePlan) -> dict[int, int]:
    """Return by id the rank that holds each parameter that is only in blocks of one rank."""
    found: dict[int, set[int]] = {}
    prefixes = {f"{name}.": stages.rank_of(number) for number, name in enumerate(stages.blocks)}
    for name, value in model.named_parameters(remove_duplicate=False):
        rank = next((rank for prefix, rank in prefixes.items() if name.startswith(prefix)), None)
        found.setdefault(id(value), set()).add(-1 if rank is None or not value.dim() else rank)
    return {key: next(iter(own)) for key, own in found.items() if len(own) == 1 and -1 not in own}
