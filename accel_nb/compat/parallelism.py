"""Sizes of a device mesh, with accelerate's names.

The record describes and builds any mesh. An `Accelerator` trains with replicas (DDP), shards (FSDP2), divided layers,
sequences, blocks and experts; it raises an error if DeepSpeed is to divide sequences.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from accel_nb.errors import ConfigError
from accel_nb.runtime.process.environment import get_variable

_PREFIX = "PARALLELISM_CONFIG_"
_ORDER = ("pp", "dp_replicate", "dp_shard", "cp", "sp", "tp")
_ATTENTION = ("sdpa", "flash_attention_2", "flash_attention_3")


def _check_choice(name: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise ValueError(f"Invalid {name}: {value}; allowed are {', '.join(allowed)}")
    return value


@dataclass
class TorchContextParallelConfig:
    """Options of context parallelism by torch: how processes exchange parts of sequences."""

    cp_comm_strategy: str | None = None

    def __post_init__(self) -> None:
        found = self.cp_comm_strategy or get_variable(f"{_PREFIX}CP_COMM_STRATEGY", "allgather")
        self.cp_comm_strategy = _check_choice("cp_comm_strategy", found, ("allgather", "alltoall"))


@dataclass
class DeepSpeedSequenceParallelConfig:
    """Options of sequence parallelism by DeepSpeed."""

    sp_seq_length: int | None = None
    sp_seq_length_is_variable: bool | None = None
    sp_attn_implementation: str | None = None

    def __post_init__(self) -> None:
        if self.sp_seq_length_is_variable is None:
            self.sp_seq_length_is_variable = self.sp_seq_length is None
        found = self.sp_attn_implementation or get_variable(f"{_PREFIX}SP_ATTN_IMPLEMENTATION", "sdpa")
        self.sp_attn_implementation = _check_choice("sp_attn_implementation", found, _ATTENTION)


@dataclass
class TorchTensorParallelConfig:
    """Options of tensor parallelism."""

    enable_async_tp: bool = False

    def __post_init__(self) -> None:
        if self.enable_async_tp:
            raise ConfigError("enable_async_tp=True is not supported: layers are divided by transformers; leave it out")


@dataclass
class ParallelismConfig:
    """The sizes of a mesh's dimensions; None means the variable ``PARALLELISM_CONFIG_...``, or 1.

    Args:
        dp_replicate_size: Number of replicas of the model.
        dp_shard_size: Number of processes among which weights are sharded.
        tp_size: Processes that divide layers.
        cp_size: Processes that divide sequences, by torch.
        cp_backend: Only ``torch``.
        sp_size: Processes that divide sequences, by DeepSpeed.
        sp_backend: Only ``deepspeed``.
        tp_handler: Options of tensor parallelism.
        cp_handler: Options of context parallelism by torch.
        sp_handler: Options of sequence parallelism by DeepSpeed.
        pp_size: Stages of blocks. accelerate has no such field, nor the next.
        ep_size: Processes that hold different experts; they divide the data, and do not add to the number of processes.
    """

    dp_replicate_size: int | None = None
    dp_shard_size: int | None = None
    tp_size: int | None = None
    cp_size: int | None = None
    cp_backend: str | None = None
    sp_size: int | None = None
    sp_backend: str | None = None
    tp_handler: TorchTensorParallelConfig | None = None
    cp_handler: TorchContextParallelConfig | None = None
    sp_handler: DeepSpeedSequenceParallelConfig | None = None
    pp_size: int | None = None
    ep_size: int | None = None
    device_mesh: Any = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in (*_ORDER, "ep"):
            given = getattr(self, f"{name}_size")
            size = int(get_variable(f"{_PREFIX}{name}_size".upper(), "1")) if given is None else given
            if size < 1:
                raise ValueError(f"{name}_size is {size}; it must be a whole number of at least 1")
            setattr(self, f"{name}_size", size)
        self.cp_backend = _check_choice("cp_backend", self.cp_backend or "torch", ("torch",))
        self.sp_backend = _check_choice("sp_backend", self.sp_backend or "deepspeed", ("deepspeed",))
        if self.sizes["cp"] > 1 and self.sizes["sp"] > 1:
            raise ValueError("cp_size and sp_size both divide sequences; leave one of them at 1")
        if self.sizes["cp"] > 1 and self.cp_handler is None:
            self.cp_handler = TorchContextParallelConfig()
        if self.sizes["sp"] > 1 and self.sp_handler is None:
            self.sp_handler = DeepSpeedSequenceParallelConfig()
        if self.sizes["tp"] > 1 and self.tp_handler is None:
            self.tp_handler = TorchTensorParallelConfig()

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of all dimensions, in the mesh's order."""
        return {name: getattr(self, f"{name}_size") for name in _ORDER}

    @property
    def total_size(self) -> int:
        """The number of processes of the mesh."""
        return math.prod(self.sizes.values())

    @property
    def active_mesh_dims(self) -> list[str]:
        """The dimensions of a size over 1."""
        return [name for name, size in self.sizes.items() if size > 1]

    def _among(self, *names: str) -> list[str]:
        return [name for name in names if self.sizes[name] > 1]

    @property
    def dp_dim_names(self) -> list[str]:
        """The dimensions that divide data."""
        return self._among("dp_replicate", "dp_shard")

    @property
    def non_dp_dim_names(self) -> list[str]:
        """The dimensions whose processes read the same data."""
        return self._among("pp", "tp", "cp", "sp")

    @property
    def dp_shard_cp_dim_names(self) -> list[str]:
        """The dimensions over which weights are sharded."""
        return self._among("dp_shard", "cp")

    @property
    def dp_cp_dim_names(self) -> list[str]:
        """The dimensions over which losses are averaged."""
        return self._among("dp_replicate", "dp_shard", "cp")

    @property
    def fsdp_dim_names(self) -> list[str]:
        """The dimensions that FSDP2 uses."""
        return [*self._among("dp_replicate"), *(["dp_shard_cp"] if self.dp_shard_cp_dim_names else [])]

    @property
    def dp_replicate_enabled(self) -> bool:
        """Whether there are several replicas."""
        return self.sizes["dp_replicate"] > 1

    @property
    def dp_shard_enabled(self) -> bool:
        """Whether weights are sharded."""
        return self.sizes["dp_shard"] > 1

    @property
    def fsdp_enabled(self) -> bool:
        """Whether weights are sharded."""
        return self.dp_shard_enabled

    @property
    def tp_enabled(self) -> bool:
        """Whether layers are divided."""
        return self.sizes["tp"] > 1

    @property
    def cp_enabled(self) -> bool:
        """Whether torch divides sequences."""
        return self.sizes["cp"] > 1

    @property
    def sp_enabled(self) -> bool:
        """Whether DeepSpeed divides sequences."""
        return self.sizes["sp"] > 1

    @property
    def data_parallel_size(self) -> int:
        """The number of shares into which data is divided."""
        return self.sizes["dp_replicate"] * self.sizes["dp_shard"]

    def as_options(self) -> dict[str, Any]:
        """Return the options with the same meaning; raise `ConfigError` if DeepSpeed is to divide sequences.

        Without shards the strategy stays ``auto``, which replicates models that fit.
        """
        sizes = {**self.sizes, "ep": self.ep_size or 1}
        if sizes["sp"] > 1:
            raise ConfigError(
                f"sp_size={sizes['sp']} from ParallelismConfig(...): DeepSpeed divides no sequences here; use cp_size"
            )
        options: dict[str, Any] = {}
        if sizes["dp_shard"] > 1 or sizes["cp"] > 1:
            options["strategy"] = "fsdp"
            if sizes["dp_replicate"] > 1:
                options["fsdp.hybrid_shard_size"] = sizes["dp_shard"]
        return options | {f"mesh.{name}": sizes[name] for name in ("tp", "cp", "pp", "ep") if sizes[name] > 1}

    @property
    def non_data_parallel_size(self) -> int:
        """The number of processes that compute one share of the data together."""
        return math.prod(self.sizes[name] for name in ("pp", "tp", "cp", "sp"))

    def check_world(self, num_processes: int) -> None:
        """Raise an error if the mesh is not one of this many processes."""
        if self.total_size not in (1, num_processes):
            sizes = ", ".join(f"{name}_size={size}" for name, size in self.sizes.items() if size > 1)
            raise ValueError(
                f"ParallelismConfig({sizes}) is a mesh of {self.total_size} processes, and there are {num_processes}; "
                "change a size, or start as many processes"
            )

    def _get_mesh(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Return names and sizes of the divided dimensions, in the mesh's order."""
        return tuple(self.active_mesh_dims), tuple(self.sizes[name] for name in self.active_mesh_dims)

    def build_device_mesh(self, device_type: str, enclosing_mesh: Any = None) -> Any:
        """Build and return the mesh, with the joint dimensions that strategies use; None if nothing is divided.

        ``enclosing_mesh`` is a mesh with these dimensions, and others of size 1, whose process groups are used. Every
        rank must call.
        """
        import torch
        from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

        names, shape = self._get_mesh()
        if not names:
            return None
        if enclosing_mesh is None or self.cp_enabled:  # there the ranks of `cp` count as ranks of the data
            mesh: Any = init_device_mesh(device_type, shape, mesh_dim_names=names)
        else:
            ranks, groups = (
                torch.arange(self.total_size, device="cpu").view(shape),
                [enclosing_mesh.get_group(name) for name in names],
            )
            mesh = DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=names)
        for joint, parts in self._joint_dims():
            mesh[parts]._flatten(joint)
        self.device_mesh = mesh
        return mesh

    def get_device_mesh(self, device_type: str | None = None) -> Any:
        """Return the mesh, which the first call builds."""
        if self.device_mesh is None and device_type is not None:
            self.build_device_mesh(device_type)
        return self.device_mesh

    def _joint_dims(self) -> Iterator[tuple[str, list[str]]]:
        for joint, parts in (
            ("dp", self.dp_dim_names),
            ("dp_shard_cp", self.dp_shard_cp_dim_names),
            ("dp_cp", self.dp_cp_dim_names),
        ):
            if parts:
                yield joint, parts
