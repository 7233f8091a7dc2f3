"""Loading of models on the meta device: each rank reads its shards of the weights from safetensors files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from accel_nb.bigmodel.safetensors_reader import FileTensor, SafetensorsCheckpoint
from accel_nb.errors import ConfigError
from accel_nb.runtime.distributed import sharded


class WeightFilling:
    """The meta tensors of a model, and the tensors of a checkpoint with their values.

    Raises `ConfigError`, before anything is changed, with every tensor that is missing or of another shape.
    """

    def __init__(self, model: nn.Module, checkpoint: SafetensorsCheckpoint) -> None:
        self._model = model
        self._sources: dict[int, FileTensor] = {}
        names: dict[int, list[str]] = {}
        tensors: dict[int, Tensor] = {}
        for name, value in (
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ):
            if value.is_meta:
                tensors[id(value)] = value
                names.setdefault(id(value), []).append(name)
        problems: list[str] = []
        for key, value in tensors.items():
            found = next((checkpoint.tensors[name] for name in names[key] if name in checkpoint.tensors), None)
            if found is None:
                problems.append(f"{checkpoint.path} has no tensor {names[key][0]}, which is a meta tensor in the model")
            elif found.shape != tuple(value.shape):
                problems.append(
                    f"{names[key][0]} has shape {list(found.shape)} in {checkpoint.path}, and "
                    f"{list(value.shape)} in the model"
                )
            else:
                self._sources[key] = found
        if problems:
            raise ConfigError(problems)

    @torch.no_grad()
    def fill_whole(self, device: torch.device) -> None:
        """Read the tensors that are not sharded: buffers and 0-dim parameters."""
        buffers: dict[int, Tensor] = {}  # a tensor of several modules stays one tensor
        for module in self._model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta:
                    if id(buffer) not in buffers:
                        buffers[id(buffer)] = self._read(buffer, device)
                    module._buffers[name] = buffers[id(buffer)]
            for value in module._parameters.values():
                if value is not None and value.is_meta and value.dim() == 0:
                    fill_parameter(value, self._read(value, device))

    @torch.no_grad()
    def allocate_shards(self, device: torch.device) -> None:
        """Allocate this rank's shards of the parameters; call it after the model was sharded."""
        root: Any = self._model
        root._apply(lambda value: torch.empty_like(value, device=device) if value.is_meta else value)

    @torch.no_grad()
    def fill_shards(self, changed: dict[int, nn.Parameter]) -> None:
        """Read this rank's shard of each parameter.

        ``changed`` has the sharded parameters by the ids of the originals.
        """
        for key, now in changed.items():
            source = self._sources.get(key)
            if source is None:
                continue
            shard = sharded.local_shard(now)
            row = source.numel // max(1, source.shape[0])
            values = torch.empty(shard.shape, dtype=shard.dtype, device="cpu")
            source.slice(sharded.own_region(now)[0][0] * row, values.numel()).read_into(values)
            shard.copy_(values)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters on the meta device, each once."""
        yield from (value for value in self._model.parameters() if value.is_meta)

    def fill_elements(self, parameter: nn.Parameter, start: int, out: Tensor) -> None:
        """Read the elements of a flattened parameter from ``start`` on into ``out``, of one dim and on the CPU."""
        self._sources[id(parameter)].slice(start, out.numel()).read_into(out)

    def _read(self, value: Tensor, device: torch.device) -> Tensor:
        values = torch.empty(value.shape, dtype=value.dtype, device="cpu")
        self._sources[id(value)].read_into(values)
        return values.to(device)


def fill_parameter(parameter: nn.Parameter, values: Tensor) -> None:
    """Set the values of a parameter on the meta device; the object stays the same."""
    torch.utils.swap_tensors(parameter, nn.Parameter(values, parameter.requires_grad))
