"""One rank reads a checkpoint, which the others do not have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from accel_nb.bigmodel.loading.load import load_checkpoint_and_dispatch, load_checkpoint_in_model
from accel_nb.bigmodel.meta import init_empty_weights
from accel_nb.bigmodel.quantization.quantize import quantize_model, quantized_layers
from accel_nb.errors import ConfigError
from accel_nb.runtime.process.requirements import unmet_extra
from accel_nb.runtime.world import World
from tests.ranks.launch import run_ranks
from tests.support.checkpoints import save_sharded
from tests.support.transformer import Transformer

TOKENS = torch.arange(24).reshape(2, 12)


def loaded(world: World, folder: str, quantization: str | None, dtype: str | None, meta: bool) -> Any:
    path = Path(folder) if world.rank == 0 else Path(folder) / "of-rank-0-alone"
    if meta:
        with init_empty_weights():
            model = Transformer()
    else:
        torch.manual_seed(world.rank)
        model = Transformer()
    if quantization:
        quantize_model(model, quantization, dtype=dtype)
    places: Any = {"": "cpu"} if world.rank == 0 or not meta else "auto"
    load_checkpoint_and_dispatch(model, path, places, {"cpu": "1GB"}, dtype=dtype, broadcast_from_rank0=True)
    with torch.no_grad():
        return model(TOKENS), model.head.weight is model.embedding.weight, len(quantized_layers(model))


@pytest.mark.parametrize(
    ("quantization", "dtype", "meta"),
    [(None, None, True), (None, "bfloat16", True), (None, None, False), ("int8", None, True)],
)
def test_every_rank_has_what_rank_0_has_read(
    tmp_path: Path, quantization: str | None, dtype: str | None, meta: bool
) -> None:
    if quantization and unmet_extra("quantize", "torchao") is not None:
        pytest.skip("torchao is an extra")
    resident = Transformer()
    save_sharded(resident, tmp_path)
    if dtype:
        resident.to(torch.bfloat16)
    if quantization:
        quantize_model(resident, quantization)
    with torch.no_grad():
        expected = resident(TOKENS)
    for output, is_tied, num_layers in run_ranks(loaded, 3, str(tmp_path), quantization, dtype, meta):
        torch.testing.assert_close(output, expected)
        assert is_tied
        assert num_layers == (16 if quantization else 0)


def refused(world: World, folder: str) -> list[str]:
    reported: list[str] = []
    for what in ("no file", "another model", "disk"):
        model = Transformer(depth=4 + (what == "another model" and world.rank == 1))
        path = Path(folder) / "nowhere" if what == "no file" else folder
        try:
            places = {"": "disk" if what == "disk" and world.rank == 1 else "cpu"}
            load_checkpoint_in_model(model, path, places, broadcast_from_rank0=True)
        except ConfigError as error:
            reported.append(str(error))
    return reported


def test_what_is_wrong_on_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    save_sharded(Transformer(), tmp_path)
    for reported in run_ranks(refused, 2, str(tmp_path)):
        assert len(reported) == 3
        assert "there is no checkpoint" in reported[0]
        assert "have other tensors" in reported[1]
        assert "nothing can stay on disk" in reported[2]
