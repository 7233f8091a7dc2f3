"""Which thread reads weights, and past what: the same bytes come whatever the way."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from accel_nb.bigmodel.loading.load import load_checkpoint_and_dispatch
from accel_nb.bigmodel.meta import init_empty_weights
from accel_nb.bigmodel.offload.dispatch import _dispatch, get_prefetcher
from accel_nb.bigmodel.offload.weight_transfer import HostTransfer, WeightSource
from accel_nb.bigmodel.safetensors_reader import SafetensorsFile, as_bytes, open_safetensors
from accel_nb.errors import ConfigError
from tests.conftest import wait_for
from tests.support.checkpoints import save_single
from tests.support.transformer import Transformer

TOKENS = torch.arange(24).reshape(2, 12)
MIB = 1 << 20


@pytest.fixture
def large(tmp_path: Path) -> tuple[SafetensorsFile, dict[str, Tensor]]:
    """A file whose tensors begin at odd places, are cut into several parts, and end with the file."""
    tensors = {
        "odd": torch.arange(3, dtype=torch.int8),
        "bytes": torch.arange(9 * MIB + 5).to(torch.int8),
        "floats": torch.arange(5 * MIB // 2, dtype=torch.float32),
        "none": torch.empty(0, 4),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    return SafetensorsFile(tmp_path / "model.safetensors"), tensors


@pytest.mark.parametrize("past_cache", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["as stored", "converted"])
def test_a_buffer_is_filled_by_several_threads(large: Any, past_cache: bool, dtype: torch.dtype) -> None:
    file, tensors = large
    if past_cache and not file.bypass_cache():
        pytest.skip("this file system has no way past its cache")
    outs = {name: torch.empty_like(value, dtype=dtype if name == "floats" else None) for name, value in tensors.items()}
    lane = HostTransfer(num_threads=3)
    for _ in range(2):
        for out in outs.values():
            out.zero_()
        lane.fill([(file.tensors[name], out) for name, out in outs.items()], ())
        assert all(torch.equal(out, tensors[name].to(out.dtype)) for name, out in outs.items())


@pytest.mark.parametrize("past_cache", [False, True])
def test_a_file_cut_short_is_an_error_for_every_thread(large: Any, past_cache: bool) -> None:
    file, tensors = large
    if past_cache and not file.bypass_cache():
        pytest.skip("this file system has no way past its cache")
    os.truncate(file.path, 12 * MIB)
    with pytest.raises(OSError, match="truncated while in use"):
        HostTransfer(num_threads=3).fill([(file.tensors["bytes"], torch.empty_like(tensors["bytes"]))], ())
    assert not file.is_cached(file.tensors["bytes"].offset, file.tensors["bytes"].nbytes)


def test_what_is_past_the_cache_is_never_at_hand(large: Any) -> None:
    file, tensors = large
    if not file.bypass_cache():
        pytest.skip("this file system has no way past its cache")
    assert not file.tensors["bytes"].is_in_memory()
    out = torch.empty_like(tensors["bytes"])
    file.read(file.tensors["bytes"].offset, as_bytes(out))
    assert torch.equal(out, tensors["bytes"])


class RecordingTransfer(HostTransfer):
    """Records which threads filled buffers."""

    def __init__(self, gains: bool) -> None:
        super().__init__()
        self.gains = gains
        self.readers: set[int] = set()

    def can_lease(self, sources: Sequence[WeightSource], *, reads_few_rows: bool = False) -> bool:
        return False

    def benefits_from_prefetch(self, sources: Sequence[WeightSource]) -> bool:
        return self.gains

    def fill(self, jobs: Sequence[tuple[WeightSource, Tensor]], events: Sequence[Any]) -> None:
        self.readers.add(threading.get_ident())
        super().fill(jobs, events)


@pytest.mark.parametrize("gains", [False, True])
def test_reading_ahead_is_left_where_nothing_is_gained(tmp_path: Path, gains: bool) -> None:
    resident, model = Transformer(), Transformer()
    on_disk = open_safetensors(save_single(resident, tmp_path)).tensors
    lane = RecordingTransfer(gains)
    _dispatch(model, {"": "disk"}, None, offload_index=on_disk, transfer=lane)
    with torch.inference_mode():
        for _ in range(3):
            assert torch.equal(model(TOKENS), resident(TOKENS))
    own = {threading.get_ident()}
    assert wait_for(lambda: lane.readers > own) if gains else lane.readers == own


@pytest.mark.parametrize("room", [0, 1 << 40])
def test_a_model_that_the_cache_cannot_keep_is_read_past_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    monkeypatch.setattr("accel_nb.bigmodel.offload.dispatch.available_memory", lambda: room)
    resident = Transformer(width=512, depth=1)
    with init_empty_weights():
        model = Transformer(width=512, depth=1)
    path = save_single(resident, tmp_path)
    if room == 0 and not SafetensorsFile(path).bypass_cache():
        pytest.skip("this file system has no way past its cache")
    load_checkpoint_and_dispatch(model, path, {"": "disk"})
    with torch.inference_mode():
        for _ in range(2):
            assert torch.equal(model(TOKENS), resident(TOKENS))
    stream = get_prefetcher(model)
    assert stream is not None
    sources = [piece.source for unit in stream._order for piece in unit.weights]
    assert any(source.is_in_memory() for source in sources) == (room > 0)


def test_a_mapped_model_computes_from_its_files_and_never_changes_them(tmp_path: Path) -> None:
    resident = Transformer()
    path = save_single(resident, tmp_path)
    before = path.read_bytes()
    with init_empty_weights():
        model = Transformer()
    load_checkpoint_and_dispatch(model, path, {"": "cpu"}, mmap=True)
    files = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(path))]
    begin, end = (int(place, 16) for place in files[0].split()[0].split("-"))
    assert all(begin <= parameter.data_ptr() < end for parameter in model.parameters())
    assert model.head.weight is model.embedding.weight
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS), resident(TOKENS))
        for parameter in model.parameters():
            parameter.add_(1)
    pairs = zip(model.parameters(), resident.parameters(), strict=True)
    assert all(torch.equal(own, value + 1) for own, value in pairs)
    assert path.read_bytes() == before


def test_a_mapped_model_is_converted_in_memory_of_its_own(tmp_path: Path) -> None:
    resident = Transformer()
    with init_empty_weights():
        model = Transformer()
    load_checkpoint_and_dispatch(model, save_single(resident, tmp_path), {"": "cpu"}, dtype="bfloat16", mmap=True)
    with torch.no_grad():
        assert torch.equal(model(TOKENS), resident.bfloat16()(TOKENS))
    with pytest.raises(ConfigError, match="leave one out"):
        load_checkpoint_and_dispatch(model, tmp_path, mmap=True, broadcast_from_rank0=True)
