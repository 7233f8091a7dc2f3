"""Files of offloaded models under the alias, and what its loaders and quantized models say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader

from accel_nb.compat.accelerator import Accelerator, refuse_offloaded_quantized
from accel_nb.compat.data.batch_shards import set_epoch_of
from accel_nb.compat.data.data_loaders import SeedableRandomSampler, skip_first_batches
from accel_nb.compat.models.big_models import load_checkpoint_and_dispatch
from accel_nb.compat.models.weight_files import has_absent_weights, read_weights, save_offloaded, save_with_torch
from accel_nb.errors import ConfigError
from accel_nb.runtime.world import World
from tests.ranks.launch import run_ranks

PLACES = {"0": "cpu", "1": "disk", "2": "disk"}


def build() -> Any:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    return model.eval()


@pytest.mark.parametrize("is_pickled", [True, False])
def test_weights_on_disk_are_saved_again_in_both_formats(tmp_path: Path, is_pickled: bool) -> None:
    model, given = build(), torch.randn(5, 3)
    expected, state = model(given), {name: value.clone() for name, value in model.state_dict().items()}
    if is_pickled:
        save_with_torch(state, tmp_path / "saved", "1GB", writes=True)
    else:
        save_offloaded(model, tmp_path / "saved", "1GB", writes=True)
    assert not has_absent_weights(model)
    load_checkpoint_and_dispatch(model, tmp_path / "saved", PLACES, offload_folder=tmp_path / "offloaded")
    assert has_absent_weights(model) or is_pickled, "raw files are mapped into memory"
    torch.testing.assert_close(model(given), expected)
    save_offloaded(model, tmp_path / "again", "1GB", writes=True)
    save_with_torch(dict(read_weights(model)), tmp_path / "pickled", "1GB", writes=True)
    for folder in ("again", "pickled"):
        loaded = load_checkpoint_and_dispatch(build(), tmp_path / folder)
        assert loaded.state_dict().keys() == state.keys()
        assert all(torch.equal(value, state[name]) for name, value in loaded.state_dict().items())


def test_a_pickled_checkpoint_on_disk_needs_a_folder(tmp_path: Path) -> None:
    torch.save(build().state_dict(), tmp_path / "model.bin")
    with pytest.raises(ConfigError, match="offload_folder"):
        load_checkpoint_and_dispatch(build(), tmp_path / "model.bin", PLACES)


def test_the_epoch_is_set_on_a_batch_sampler_and_on_the_sampler_in_it() -> None:
    class Batches(BatchSampler):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    data: Any = list(range(8))
    sampler = SeedableRandomSampler(data)
    batches = Batches(sampler, 2, drop_last=False)
    set_epoch_of(skip_first_batches(DataLoader(data, batch_sampler=batches), 1), 3)
    assert (batches.epoch, sampler.epoch) == (3, 3)


def test_a_quantized_model_with_offloaded_parts_is_refused() -> None:
    model: Any = build()
    model.is_loaded_in_8bit, model.hf_device_map = True, {"0": 0, "1": "cpu"}
    with pytest.raises(ValueError, match=r"CPU or disk offload.*: 1;"):
        refuse_offloaded_quantized(model)
    model.hf_device_map = {"": 0}
    refuse_offloaded_quantized(model)


def prepare_and_save(world: World, folder: Path) -> list[bool]:
    """Save a model with weights on disk by `Accelerator.save_model`, and prepare a loader and a refused model."""
    accelerator = Accelerator(cpu=True)
    loader: Any = accelerator.prepare(DataLoader(range(4)))  # pyright: ignore[reportArgumentType]
    model = build()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    accelerator.save_model(model, folder / "saved")
    load_checkpoint_and_dispatch(model, folder / "saved", PLACES)
    accelerator.save_model(model, folder / "saved")
    accelerator.save_model(model, folder / "pickled", safe_serialization=False)
    loaded = [load_checkpoint_and_dispatch(build(), folder / name).state_dict() for name in ("saved", "pickled")]
    return [
        loader.gradient_state is accelerator.gradient_state,
        *(torch.equal(found[name], value) for found in loaded for name, value in state.items()),
    ]


def test_a_model_with_weights_on_disk_is_saved_over_its_own_files(tmp_path: Path) -> None:
    [found] = run_ranks(prepare_and_save, 1, tmp_path)
    assert len(found) == 19
    assert all(found)
