"""Files of the trained weights of a prepared model."""

from pathlib import Path
from typing import Any

import torch

from accel_nb import Accelerator
from accel_nb.compat.models.sharded_files import load_fsdp_model, merge_fsdp_weights, save_fsdp_model
from accel_nb.compat.states import PartialState
from accel_nb.runtime.process.environment import set_rank_variables
from accel_nb.runtime.world import World
from tests.ranks.launch import run_ranks


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


def errors_of_one_rank(world: World, folder: Path) -> list[str]:
    """Return the errors of a save to a file's place, a load of a file that one rank lacks, and a merge of no shards."""
    set_rank_variables(world)
    state = PartialState()
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    (folder / "file").write_text("x")
    save_fsdp_model(None, accelerator, model, folder / "saved")
    loaded = folder / "saved" if world.is_main else folder / "nothing"
    calls: list[Any] = [
        lambda: save_fsdp_model(None, accelerator, model, folder / "file"),
        lambda: load_fsdp_model(None, accelerator, model, loaded),
        lambda: merge_fsdp_weights(folder / "nothing", folder / "merged"),
    ]
    found: list[str] = []
    for call in calls:
        try:
            call()
        except Exception as error:
            found.append(str(error))
    accelerator.close()
    state.destroy_process_group()
    return found


def test_an_error_of_one_process_is_raised_on_all(tmp_path: Path) -> None:
    for found in run_ranks(errors_of_one_rank, 2, tmp_path, timeout_s=60):
        assert len(found) == 3
        assert "File exists" in found[0]
        assert "does not exist" in found[1]
        assert "there is no checkpoint" in found[2] or "no complete checkpoint" in found[2]
