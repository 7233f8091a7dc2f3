"""Files of the trained weights of a prepared model."""

from pathlib import Path

import torch

from accel_nb import Accelerator
from accel_nb.compat.models.sharded_files import load_fsdp_model, save_fsdp_model


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(2, 2, bias=False)
        self.second = torch.nn.Linear(2, 2, bias=False)
        self.second.weight = self.first.weight


def test_tied_weights_that_train_are_saved_and_loaded(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(Tied())
    with torch.no_grad():
        model.first.weight.fill_(3)
    save_fsdp_model(None, accelerator, model, tmp_path, adapter_only=True)
    with torch.no_grad():
        model.first.weight.fill_(0)
    load_fsdp_model(None, accelerator, model, tmp_path, adapter_only=True)
    assert torch.equal(model.first.weight, torch.full((2, 2), 3.0))
