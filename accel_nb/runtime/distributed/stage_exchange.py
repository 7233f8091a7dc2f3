"""Messages between adjacent stages of a model, and from the last stage to all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from accel_nb.errors import MisuseError
from accel_nb.runtime.distributed.communicator import Communicator, TorchComm

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_MAX_DIMS = 8
_FAILED = -1

TensorSpec = tuple[tuple[int, ...], torch.dtype]
"""The shape and the dtype of a tensor."""


class StageExchange:
    """Sends activations to the next stage and gradients to the previous one, over the ranks of ``comm``.

    The last rank computes the last stage.
    """

    def __init__(self, comm: Communicator, device: torch.device) -> None:
        assert isinstance(comm, TorchComm), "several stages have a communicator of several ranks"
        self.comm = comm
        self._device = device
        self.rank, self.num_ranks = comm.world.rank, comm.world.size

    @property
    def is_last(self) -> bool:
        """Whether this rank computes the last stage."""
        return self.rank == self.num_ranks - 1

    def send_spec(self, tensor: Tensor | None, target: int) -> Callable[[], object]:
        """Start to send shape and dtype of the next tensor, or that there is none; return a function that waits."""
        header = torch.full((2 + _MAX_DIMS,), _FAILED, dtype=torch.int64, device="cpu")
        if tensor is not None:
            if tensor.dtype not in _DTYPES or tensor.dim() > _MAX_DIMS:
                raise MisuseError(
                    f"stages exchange tensors of floats, and a block returned one of {tensor.dtype} with "
                    f"{tensor.dim()} dims: train with --pp 1"
                )
            header[0], header[1] = _DTYPES.index(tensor.dtype), tensor.dim()
            header[2 : 2 + tensor.dim()] = torch.tensor(tensor.shape, dtype=torch.int64, device="cpu")
        return self.comm.start_send(header, target)

    def receive_spec(self, source: int) -> TensorSpec | None:
        """Return shape and dtype of the next tensor; None if there is none."""
        kind, dims, *shape = self.comm.receive(
            torch.empty(2 + _MAX_DIMS, dtype=torch.int64, device="cpu"), source
        ).tolist()
        return None if kind == _FAILED else (tuple(shape[:dims]), _DTYPES[kind])

    def send(self, tensor: Tensor, target: int) -> Callable[[], object]:
        """Start to send a tensor; return a function that waits. Until that has returned, the tensor must not change."""
        return self.comm.start_send(_as_bytes(tensor), target)

    def receive(self, spec: TensorSpec, source: int) -> Tensor:
        """Return the tensor of this shape and dtype that a rank sends."""
        tensor = torch.empty(spec[0], dtype=spec[1], device=self._device)
        self.comm.receive(_as_bytes(tensor), source)
        return tensor

    def broadcast_specs(self, tensors: Sequence[Tensor] | None) -> list[tuple[TensorSpec, bool]]:
        """Return shape and dtype of each of the last stage's tensors, and whether it requires a gradient."""
        found = None
        if tensors is not None:
            found = [[list(value.shape), str(value.dtype), value.requires_grad] for value in tensors]
        sent: list[Any] = self.comm.broadcast_json(found, self.num_ranks - 1)
        return [((tuple(shape), getattr(torch, name.removeprefix("torch."))), needs) for shape, name, needs in sent]

    def broadcast_outputs(self, tensors: Sequence[Tensor] | None, specs: Sequence[TensorSpec]) -> list[Tensor]:
        """Return the last stage's tensors on every rank; ``tensors`` is None on the others."""
        if tensors is None:
            tensors = [torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in specs]
        shared: list[Tensor] = []
        for tensor in tensors:
            dense = tensor.contiguous()
            self.comm.broadcast(_as_bytes(dense), self.num_ranks - 1)
            shared.append(dense)
        return shared

    def broadcast_value(self, value: Any) -> Any:
        """Return the last stage's value on every rank."""
        return self.comm.broadcast_json(value if self.is_last else None, self.num_ranks - 1)

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on the rank of any stage."""
        return bool(self.comm.all_reduce(torch.tensor([int(flag)], device="cpu"), "max").item())


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes, as backends lack some dtypes; a view if it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
