"""Copies ahead of time on a real device; needs one CUDA device."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from accel_nb.config.sections import DataOptions
from accel_nb.data.loader import shard_loader
from accel_nb.data.prefetch import StreamTransfer
from accel_nb.runtime.distributed.communicator import LocalComm
from accel_nb.runtime.world import World
from tests.support.loops import Loops

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize(("pin_memory", "num_workers"), [(False, 0), (True, 0), (True, 2)])
def test_batches_arrive_whole_while_the_device_is_busy(pin_memory: bool, num_workers: int) -> None:
    device = torch.device("cuda", 0)
    data = TensorDataset(torch.arange(64)[:, None].expand(64, 100_000).float())
    loader = shard_loader(
        DataLoader(data, batch_size=8, pin_memory=pin_memory, num_workers=num_workers),
        comm=LocalComm(World(device="cuda:0")),
        batch="global",
        device=device,
        observer=Loops(),
        options=DataOptions(non_blocking=True),
    )
    busy = torch.randn(2048, 2048, device=device)
    sums = []
    for (batch,) in loader:
        assert batch.device == device
        for _ in range(20):  # the copy of the next batch must neither wait for this nor overtake it
            busy = busy @ busy
            busy = busy / busy.norm()
        sums.append(batch.mean(1))
        del batch  # its memory may be used again by the side stream, and only once the mean above is done
    torch.cuda.synchronize()

    assert torch.equal(torch.cat(sums).cpu(), torch.arange(64).float())


def test_a_copy_keeps_what_is_no_tensor() -> None:
    lane = StreamTransfer(torch.device("cuda", 0), pins=True)

    batch = lane.finish(lane.start({"x": torch.ones(2), "names": ["a", "b"], "none": None}))

    assert batch["x"].is_cuda
    assert (batch["names"], batch["none"]) == (["a", "b"], None)
