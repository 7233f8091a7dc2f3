"""The methods ``state_dict`` and ``load_state_dict`` of sharded loaders of torchdata's class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import DataLoader

from accel_nb.data.loader import explain_no_resume, get_position, resume_loader
from accel_nb.data.position import LoaderPosition, is_stateful
from accel_nb.errors import CheckpointError
from accel_nb.runtime.distributed.communicator import Communicator

_POSITION = "accel_nb_position"


def replace_state_methods(loader: DataLoader[Any], comm: Communicator) -> None:
    """Make the state of a sharded loader its position in the divided data; do nothing for a class without a state.

    The state is the position after the batch that was yielded last, as in torchdata. It is the same for any number of
    ranks; all of them load the state that rank 0 passes, so every rank must call.
    """
    if not is_stateful(loader):
        return

    def state_dict(self: DataLoader[Any]) -> dict[str, Any]:
        return {_POSITION: get_position(self, includes_latest=True).to_json()}

    def load_state_dict(self: DataLoader[Any], state_dict: Mapping[str, Any]) -> None:
        values = comm.broadcast_json(state_dict.get(_POSITION))
        if values is None:
            raise CheckpointError("this is not the state of a prepared loader: save the state after prepare")
        position = LoaderPosition.from_json(values)
        problem = explain_no_resume(self, position)
        if problem is not None:
            raise CheckpointError(problem)
        resume_loader(self, position)

    kind: Any = type(loader)  # only this loader has it
    kind.state_dict, kind.load_state_dict = state_dict, load_state_dict
