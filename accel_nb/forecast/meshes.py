"""Plans of meshes: ranks that compute layers, sequences or blocks together. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from accel_nb.forecast.layouts import FULLY_SHARDED, REPLICATED, Layout
from accel_nb.forecast.memory import Activations, MemoryUsage, estimate
from accel_nb.forecast.sizes import ModelSizes

DIMENSIONS = ("pp", "cp", "tp", "ep")


@dataclass(frozen=True, slots=True)
class MeshShape:
    """The numbers of ranks that compute blocks, sequences and layers together, and that hold different experts."""

    pp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    @property
    def size(self) -> int:
        """The number of ranks that read the same samples."""
        return self.pp * self.cp * self.tp

    @property
    def degrees(self) -> dict[str, int]:
        """The dimensions with several ranks."""
        return {name: degree for name in DIMENSIONS if (degree := getattr(self, name)) > 1}

    def describe(self) -> str:
        """Return the dimensions as text, as in "pp 2 x tp 2"."""
        return " x ".join(f"{name} {degree}" for name, degree in self.degrees.items())


NO_MESH = MeshShape()
"""The mesh of data parallel training: every rank reads different samples."""


def simple_shapes(world: int) -> tuple[MeshShape, ...]:
    """Return the meshes with one dimension, whose size is the smallest divisor of ``world`` above 1.

    They are compared with data parallel training.
    """
    smallest = next((number for number in range(2, world + 1) if world % number == 0), 0)
    return tuple(MeshShape(**{name: smallest}) for name in reversed(DIMENSIONS)) if smallest else ()


@dataclass(frozen=True, slots=True)
class MeshSizes:
    """The sizes of the shard of a model on one rank of a mesh (the largest one), before FSDP shards it further.

    ``undivided`` are the sizes with undivided experts, needed where FSDP shards the experts too.
    ``activations`` are those of the samples of one rank. ``sent_bytes`` are the bytes that the rank sends in a
    step in addition to gradients and weights. ``refusal`` is why the model cannot be trained in this mesh.
    """

    shape: MeshShape
    model: ModelSizes
    undivided: ModelSizes
    activations: Activations | None = None
    checkpointed: Activations | None = None
    sent_bytes: int = 0
    refusal: str | None = None


def mesh_layouts(shape: MeshShape, world: int) -> list[Layout]:
    """Return the layouts of a mesh: over the remaining ranks the model is replicated, or sharded."""
    options = {f"mesh.{name}": degree for name, degree in shape.degrees.items()}
    found: list[Layout] = []
    for base in (REPLICATED, FULLY_SHARDED):
        divides = base is FULLY_SHARDED
        if not divides or world > shape.pp * shape.tp:
            named = [base.name] if divides or world > shape.size else []
            name = " x ".join([*named, shape.describe()])
            found.append(replace(base, name=name, options={**base.options, **options}))
    return found


def estimate_mesh(
    sizes: MeshSizes, layout: Layout, world: int, activations: Activations | None, is_half: bool
) -> MemoryUsage:
    """Return the memory of a rank of ``world`` in a mesh.

    Context-parallel ranks replicate or shard parameters as data-parallel ranks do, so only pp and tp reduce the number
    of ranks that share them.
    """
    ranks = world // (sizes.shape.pp * sizes.shape.tp)
    model = sizes.undivided if layout.shards_parameters and sizes.shape.ep > 1 else sizes.model
    usage = estimate(model, layout, ranks, is_half=is_half, activations=activations or Activations(0))
    return replace(usage, sent_bytes=usage.sent_bytes + sizes.sent_bytes)
