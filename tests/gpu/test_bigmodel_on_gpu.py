"""Weights that pass through a real device; needs one CUDA device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from accel_nb.bigmodel.loading.load import load_checkpoint_and_dispatch
from accel_nb.bigmodel.meta import init_empty_weights
from accel_nb.bigmodel.offload.dispatch import cpu_offload, get_prefetcher
from accel_nb.bigmodel.offload.sequential_offload import cpu_offload_with_hook
from tests.support.checkpoints import save_sharded
from tests.support.transformer import Transformer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

TOKENS = torch.arange(24).reshape(2, 12)
MAPS: list[dict[str, Any]] = [
    {"": 0},
    {"": "disk"},
    {"embedding": 0, "positions": 0, "blocks.0": 0, "blocks.1": "cpu", "blocks": "disk", "norm": "cpu", "head": 0},
]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("at", range(3))
def test_outputs_are_bit_equal_for_every_placement(tmp_path: Path, at: int, dtype: torch.dtype | None) -> None:
    places = dict(MAPS[at])
    if places.pop("blocks", None):
        places |= {f"blocks.{index}": "disk" for index in range(2, 12)}
    resident = Transformer(width=512, depth=12)
    save_sharded(resident, tmp_path)
    resident = resident.to(0, dtype)
    with init_empty_weights():
        model = Transformer(width=512, depth=12)
    load_checkpoint_and_dispatch(model, tmp_path, places, dtype=dtype)
    if at == 1:  # a map without an accelerator computes on the CPU
        resident = resident.cpu()
    inputs = TOKENS.to(next(resident.parameters()).device)
    with torch.inference_mode():
        for _ in range(5):
            output = model(TOKENS)
            assert output.device == TOKENS.device
            assert torch.equal(output, resident(inputs).cpu())


def test_weights_in_memory_compute_on_the_device() -> None:
    resident, model = Transformer(width=512, depth=12), Transformer(width=512, depth=12)
    model.load_state_dict(resident.state_dict())
    cpu_offload(model, 0)
    resident.to(0)
    busy = torch.randn(2048, 2048, device=0)
    with torch.inference_mode():
        for _ in range(5):
            busy = busy @ busy / busy.norm()  # copies must neither wait for this nor overtake what reads the buffers
            assert torch.equal(model(TOKENS.to(0)), resident(TOKENS.to(0)))
    stream = get_prefetcher(model)
    assert stream is not None
    assert stream.peak_bytes < sum(parameter.nbytes for parameter in resident.parameters()) / 3


def test_models_take_turns_on_the_device() -> None:
    models = [torch.nn.Linear(4, 4) for _ in range(2)]
    x = torch.ones(1, 4)
    expected = models[1](models[0](x))
    first, hook = cpu_offload_with_hook(models[0], 0)
    second, last = cpu_offload_with_hook(models[1], 0, hook)
    y = first(x)
    assert first.weight.is_cuda  # type: ignore[union-attr]
    torch.testing.assert_close(second(y).cpu(), expected)
    assert not first.weight.is_cuda  # type: ignore[union-attr]
    with torch.no_grad():
        second.weight.add_(1)  # type: ignore[operator,union-attr]
    changed = second.weight.detach().cpu()  # type: ignore[union-attr]
    last.offload()
    assert torch.equal(second.weight, changed)  # type: ignore[arg-type]
