"""Weights that are computed with where the system has them: the same bits, nothing left mapped, no file changed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from accel_nb.bigmodel.loading.load import load_checkpoint_and_dispatch
from accel_nb.bigmodel.meta import init_empty_weights
from accel_nb.bigmodel.offload import mmap_weights
from accel_nb.bigmodel.offload.dispatch import get_prefetcher, offloaded_weights
from accel_nb.bigmodel.offload.weight_prefetch import OffloadError, WeightPrefetcher
from accel_nb.bigmodel.planning.sizes import compute_module_sizes
from accel_nb.bigmodel.safetensors_reader import SafetensorsFile, open_safetensors
from tests.conftest import wait_for
from tests.support.checkpoints import save_single
from tests.support.transformer import Transformer

TOKENS = torch.arange(24).reshape(2, 12)
BLOCK = compute_module_sizes(Transformer())["blocks.0"]


@pytest.fixture(autouse=True)
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Report all files as cached, which not every file system can; skip where there are no leases."""
    probe = tmp_path / "probe"
    probe.mkdir()
    if not SafetensorsFile(save_single(nn.Linear(1, 1), probe)).can_lease():
        pytest.skip("this file system has no leases: everything is copied")
    monkeypatch.setattr(SafetensorsFile, "is_cached", lambda *_: True)


def on_disk(build: Any, path: Path) -> Any:
    with init_empty_weights():
        model = build()
    return load_checkpoint_and_dispatch(model, path, {"": "disk"})


def stream(model: nn.Module) -> WeightPrefetcher:
    found = get_prefetcher(model)
    assert found is not None
    return found


def save_starting_at(model: nn.Module, path: Path, phase: int) -> Path:
    """Save tensors from a multiple of 64 bytes and ``phase`` on, which a longer comment in the header moves."""
    tensors = {name: value for name, value in model.state_dict().items() if name != "head.weight"}
    for length in range(0, 128, 8):
        save_file(tensors, path, {"comment": "x" * length})
        if min(tensor.offset for tensor in open_safetensors(path).tensors.values()) % 64 == phase:
            return path
    raise AssertionError("some length moves them there")


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("no_matter", [None, False], ids=["as kernels are", "as if they were choosy"])
def test_bits_are_the_same_wherever_tensors_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_matter: bool | None, num_threads: int
) -> None:
    if no_matter is None:
        no_matter = mmap_weights.is_alignment_irrelevant()
    monkeypatch.setattr(mmap_weights, "is_alignment_irrelevant", lambda: no_matter)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        resident = Transformer(width=96)
        for phase in range(0, 64, 8):
            model = on_disk(lambda: Transformer(width=96), save_starting_at(resident, tmp_path / "one", phase))
            with torch.inference_mode():
                for tokens in (TOKENS, TOKENS[:1, :1]):
                    assert torch.equal(model(tokens), resident(tokens)), phase
            is_copied = stream(model).num_fills > 1  # the whole model's own tensor always is
            assert is_copied == (phase > 0 and not no_matter)
    finally:
        torch.set_num_threads(before)


def test_tensors_at_offsets_that_no_view_can_have_are_not_leased(tmp_path: Path) -> None:
    header = b'{"weight": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'
    for spaces in range(8):
        path = tmp_path / f"{spaces}.safetensors"
        own = header + b" " * spaces
        path.write_bytes(len(own).to_bytes(8, "little") + own + bytes(8))
        tensors = list(open_safetensors(path).tensors.values())
        can_view = tensors[0].offset % 4 == 0
        assert mmap_weights.can_lease(tensors, reads_few_rows=True) == can_view
        assert can_view or not mmap_weights.can_lease(tensors)


def test_alignment_is_measured_without_the_users_autocast() -> None:
    mmap_weights.is_alignment_irrelevant.cache_clear()
    seen: set[torch.dtype] = set()

    class Products(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func is nn.functional.linear:
                assert result.dtype == args[0].dtype
                seen.add(result.dtype)
            return result

    with torch.autocast("cpu", torch.bfloat16), Products():
        mmap_weights.is_alignment_irrelevant()
    assert torch.float32 in seen


def test_nothing_stays_mapped(tmp_path: Path) -> None:
    path = save_starting_at(Transformer(), tmp_path / "one", 0)
    model = on_disk(Transformer, path)
    seen: list[bool] = []

    def look(*_: object) -> None:
        seen.append(str(path) in Path("/proc/self/maps").read_text())

    model.blocks[1].up.register_forward_hook(look)
    with torch.no_grad():
        model(TOKENS)
    look()
    assert seen == [True, False]
    assert 0 < stream(model).peak_bytes <= 3 * BLOCK, "what is mapped counts as buffers do"


def test_what_is_written_in_place_is_kept_and_does_not_reach_the_file(tmp_path: Path) -> None:
    class Adding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.linear.weight.add_(1)
            return self.linear(x)

    model = Adding()
    kept = model.linear.weight.detach().clone()
    path = save_starting_at(model, tmp_path / "one", 0)
    with init_empty_weights():
        empty = Adding()
    # One unit, so that the weight is there when the outer forward writes to it.
    model = load_checkpoint_and_dispatch(empty, path, {"": "disk"}, preload_module_classes=["Adding"])
    before = path.read_bytes()
    with torch.no_grad():
        for count in (1, 2):
            model(torch.ones(1, 16))
            assert torch.equal(dict(offloaded_weights(model))["linear.weight"], sum([1] * count, kept))
    assert path.read_bytes() == before


def test_weights_that_outlive_the_forward_stay_readable(tmp_path: Path) -> None:
    class Showing(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return self.weight[1:].detach()

    resident = Showing(16, 16)
    model = on_disk(lambda: Showing(16, 16), save_starting_at(resident, tmp_path / "one", 0))
    shown = [model(torch.ones(1)) for _ in range(3)]
    del model
    assert all(torch.equal(one, resident.weight[1:]) for one in shown)


def test_of_a_table_only_rows_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SafetensorsFile, "is_cached", lambda *_: False)

    class Looking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(64, 16)
            self.clipped = nn.Embedding(64, 16, max_norm=0.5)

        def forward(self, rows: Tensor) -> Tensor:
            return self.table(rows) + self.clipped(rows)

    resident = Looking()
    path = save_single(resident, tmp_path)
    model = on_disk(Looking, path)
    assert {unit.name: unit.reads_few_rows for unit in stream(model)._order} == {"table": True, "clipped": False}
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(model(TOKENS), resident(TOKENS))
    assert stream(model).num_fills <= 2, "the table that is changed by looking at it, and never the other one"
    clipped = dict(offloaded_weights(model))["clipped.weight"]
    assert torch.equal(clipped, resident.clipped.weight)
    assert not torch.equal(clipped, load_file(path)["clipped.weight"])


def test_tensors_that_lie_together_are_mapped_together(tmp_path: Path) -> None:
    tensors = {name: torch.randn(size) for name, size in (("a", 3), ("b", 50_000), ("c", 5), ("d", 7))}
    save_file(tensors, tmp_path / "model.safetensors")
    found = open_safetensors(tmp_path).tensors
    chosen = [found[name] for name in ("d", "a", "c")]
    parts = [(extent.begin, extent.end, inside) for extent, inside in mmap_weights.merge_ranges(chosen)]
    assert parts == [
        (found["a"].offset, found["a"].offset + 12, [1]),
        (found["c"].offset, found["d"].offset + 28, [2, 0]),
    ]
    assert list(mmap_weights.merge_ranges([])) == []


def test_a_file_that_became_shorter_is_an_error_before_it_is_mapped(tmp_path: Path) -> None:
    path = save_starting_at(nn.Linear(16, 16), tmp_path / "one", 0)
    found = list(open_safetensors(path).tensors.values())
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(OSError, match="truncated while in use"):
        mmap_weights.lease_pages(found)


def test_truncating_a_leased_file_waits_until_the_block_has_computed(tmp_path: Path) -> None:
    resident = Transformer()
    path = save_starting_at(resident, tmp_path / "one", 0)
    model = on_disk(Transformer, path)
    done: list[str] = []

    def truncate() -> None:
        os.truncate(path, 1000)
        done.append("truncated")

    thread = threading.Thread(target=truncate)

    def start_truncating(*_: object) -> None:
        thread.start()
        leased = next(piece.source.file for piece in stream(model)._order[0].weights)  # type: ignore[union-attr]
        # The kernel asks for the lease, and the thread waits.
        assert wait_for(lambda: fcntl.fcntl(leased.fd, fcntl.F_GETLEASE) != fcntl.F_RDLCK, deadline_s=60)

    def record_computed(*_: object) -> None:
        done.append("computed")

    # Hooks of layers inside of the block: the lease is released when its forward returns, before hooks of the block.
    block: Any = model.blocks[1]
    handle = block.up.register_forward_pre_hook(start_truncating)
    block.down.register_forward_hook(record_computed)
    with torch.no_grad():
        with contextlib.suppress(OffloadError):  # the file may be truncated before the next block, or after the forward
            assert torch.equal(model(TOKENS), resident(TOKENS))
        thread.join()
        assert done == ["computed", "truncated"]
        handle.remove()
        with pytest.raises(OffloadError, match="truncated while in use"):
            model(TOKENS)


def test_a_file_that_is_open_for_writing_is_copied_from(tmp_path: Path) -> None:
    resident = Transformer()
    path = save_starting_at(resident, tmp_path / "one", 0)
    with open(path, "r+b"):
        model = on_disk(Transformer, path)
        with torch.no_grad():
            assert torch.equal(model(TOKENS), resident(TOKENS))
        assert stream(model).num_fills > 0
