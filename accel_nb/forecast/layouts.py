"""The layouts of a training: how each strategy shards and offloads its state, and the options that select it.

Imports no torch, so that the kernel can use it.

The stages are those of Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models" (2020), section 5; FSDP2 shards as their third stage does, block by block. The order of `LAYOUTS` is
the order of preference among those that fit: least communication first, PyTorch's own before other packages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from accel_nb.config.schema import OPTIONS, STRATEGIES

Options = Mapping[str, "str | int | bool"]
"""Options of a run by their dotted names, with the values that choose a layout."""

ShardingKind = Literal["torch", "blocks", "flat"]
"""``torch``: not sharded (one process, DDP); ``blocks``: `fully_shard` of each block; ``flat``: ZeRO's partitions."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The state of a training that is sharded over ranks, and the state that is offloaded to the host's memory."""

    name: str
    sharding: ShardingKind
    options: Options = field(default_factory=dict, hash=False)
    shards_parameters: bool = False
    shards_gradients: bool = False
    shards_optimizer: bool = False
    offloads_parameters: bool = False
    offloads_optimizer: bool = False
    min_world: int = 1
    max_world: int | None = None

    @property
    def offloads(self) -> bool:
        """Whether anything is offloaded to the host's memory."""
        return self.offloads_parameters or self.offloads_optimizer

    @property
    def is_supported(self) -> bool:
        """Whether this version supports the options that choose it."""
        return all(
            name in OPTIONS and (name != "strategy" or value in STRATEGIES) for name, value in self.options.items()
        )

    def supports_world(self, world: int) -> bool:
        """Return whether the layout applies to ``world`` ranks."""
        return self.min_world <= world and (self.max_world is None or world <= self.max_world)


def _fsdp(name: str, *, keeps_gathered: bool = False, offloads: bool = False) -> Layout:
    options: dict[str, str | int | bool] = {"strategy": "fsdp"}
    options |= {"fsdp.reshard_after_forward": False} if keeps_gathered else {}
    options |= {"fsdp.cpu_offload": True} if offloads else {}
    return Layout(
        name,
        "blocks",
        options,
        shards_parameters=not keeps_gathered,
        shards_gradients=True,
        shards_optimizer=True,
        offloads_parameters=offloads,
        offloads_optimizer=offloads,
        min_world=1 if offloads else 2,
    )


def _zero(stage: int, *, offloads: bool = False) -> Layout:
    options: dict[str, str | int | bool] = {"strategy": "deepspeed", "deepspeed.zero_stage": stage}
    options |= {"deepspeed.offload_optimizer": "cpu"} if offloads else {}
    options |= {"deepspeed.offload_parameters": "cpu"} if offloads and stage == 3 else {}
    return Layout(
        f"zero {stage}" + (" offload" if offloads else ""),
        "flat",
        options,
        shards_parameters=stage == 3,
        shards_gradients=stage >= 2,
        shards_optimizer=True,
        offloads_parameters=offloads and stage == 3,
        offloads_optimizer=offloads,
        min_world=1 if offloads else 2,
    )


REPLICATED = Layout("ddp", "torch", {"strategy": "ddp"}, min_world=2)
FULLY_SHARDED = _fsdp("fsdp (3)")
LAYOUTS: tuple[Layout, ...] = (
    Layout("single", "torch", {"strategy": "single"}, max_world=1),
    REPLICATED,
    _fsdp("fsdp (2)", keeps_gathered=True),
    _zero(1),
    _zero(2),
    FULLY_SHARDED,
    _zero(3),
    _fsdp("fsdp offload", offloads=True),
    _zero(2, offloads=True),
    _zero(3, offloads=True),
)

CHECKPOINTING: Options = {"activation_checkpointing": True}
"""The option that recomputes activations in the backward pass instead of keeping them."""
