"""Models whose weights are elsewhere compute what they would compute if they were there: bit by bit."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from accel_nb.bigmodel.loading.load import load_checkpoint_and_dispatch
from accel_nb.bigmodel.meta import init_empty_weights
from accel_nb.bigmodel.offload.dispatch import (
    _dispatch,
    cpu_offload,
    disk_offload,
    dispatch_model,
    get_prefetcher,
    has_offloaded_params,
    offloaded_weights,
    remove_hook_from_submodules,
)
from accel_nb.bigmodel.offload.weight_prefetch import OffloadError
from accel_nb.bigmodel.offload.weight_transfer import CHUNK_BYTES, DeviceTransfer, HostTensor, HostTransfer
from accel_nb.bigmodel.planning.sizes import compute_module_sizes
from accel_nb.bigmodel.safetensors_reader import SafetensorsFile, open_safetensors
from accel_nb.errors import ConfigError, MisuseError
from tests.conftest import wait_for
from tests.support.checkpoints import save_sharded, save_single
from tests.support.nightly import nightly
from tests.support.transformer import Transformer

pytestmark = pytest.mark.usefixtures("one_torch_thread")

BLOCK = compute_module_sizes(Transformer())["blocks.0"]
TOKENS = torch.arange(24).reshape(2, 12)


@pytest.fixture(params=["lent", "copied"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are computed with where they lie in the system's cache, or come through buffers as from a disk."""
    monkeypatch.setattr(SafetensorsFile, "is_cached", lambda *_: request.param == "lent")


@pytest.fixture
def through_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostTransfer, "can_lease", lambda *_, **__: False)


def empty(**options: Any) -> Transformer:
    with init_empty_weights():
        return Transformer(**options)


MAPS: dict[str, Any] = {
    "all on disk": {"": "disk"},
    "all in memory": {"": "cpu"},
    "blocks on disk": {"embedding": "cpu", "positions": "cpu", "blocks": "disk", "norm": "cpu", "head": "cpu"},
    "some blocks on disk": {
        "embedding": "cpu", "positions": "disk", "blocks.0": "cpu", "blocks.1": "disk", "blocks.2": "cpu",
        "blocks.3": "disk", "norm": "disk", "head": "cpu",
    },
    "parts of a block on disk": {
        "embedding": "disk", "positions": "cpu", "blocks.0.norm": "cpu", "blocks.0.mix": "disk",
        "blocks.0.out": "cpu", "blocks.0.up": "disk", "blocks.0.down": "disk", "blocks.0.scale": "disk",
        "blocks.0.table": "cpu", "blocks.1": "disk", "blocks.2": "disk", "blocks.3": "disk", "norm": "cpu",
        "head": "disk",
    },
}  # fmt: skip


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("offload_buffers", [False, True])
@pytest.mark.parametrize("places", list(MAPS))
@pytest.mark.parametrize("save", [nightly(save_single), save_sharded])
def test_outputs_are_bit_equal_for_every_placement(tmp_path: Path, save, places: str, offload_buffers: bool) -> None:
    resident = Transformer()
    model = load_checkpoint_and_dispatch(
        empty(), save(resident, tmp_path), MAPS[places], offload_buffers=offload_buffers, strict=True
    )
    with torch.no_grad():
        for length in (12, 5, 12):
            assert torch.equal(model(TOKENS[:, :length]), resident(TOKENS[:, :length]))
    with torch.inference_mode():
        assert torch.equal(model(TOKENS), resident(TOKENS))
    assert torch.equal(model(TOKENS), resident(TOKENS)), "and with gradients, and after the other modes"


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("no_split", [None, ["Block"], []], ids=["repeated", "named", "none"])
@pytest.mark.parametrize("num_resident", [nightly(3), 4, nightly(5)])
def test_outputs_are_bit_equal_wherever_a_plan_cuts(
    tmp_path: Path, tied: bool, no_split: Any, num_resident: int
) -> None:
    resident = Transformer(depth=6, tied=tied)
    path = save_sharded(resident, tmp_path)
    model = load_checkpoint_and_dispatch(
        empty(depth=6, tied=tied), path, "auto", {"cpu": num_resident * BLOCK}, no_split_module_classes=no_split
    )
    away = {name for name, parameter in model.named_parameters() if parameter.is_meta}
    assert 0 < len(away) < len(list(model.named_parameters())), "some on disk and some not"
    assert (model.head.weight is model.embedding.weight) == tied
    with torch.inference_mode():
        for length in (12, 5, 12):
            assert torch.equal(model(TOKENS[:, :length]), resident(TOKENS[:, :length]))


@pytest.mark.usefixtures("way")
def test_tied_weights_stay_one_wherever_they_are(tmp_path: Path) -> None:
    resident = Transformer()
    path = save_single(resident, tmp_path)
    for place in ("cpu", "disk"):
        model = load_checkpoint_and_dispatch(
            empty(), path, {**MAPS["blocks on disk"], "embedding": place, "head": place}
        )
        with torch.no_grad():
            assert torch.equal(model(TOKENS), resident(TOKENS))
        remove_hook_from_submodules(model)
        assert model.head.weight is model.embedding.weight
    with pytest.raises(ConfigError, match=r"one tied tensor is placed on several devices: embedding\.weight on 'cpu'"):
        load_checkpoint_and_dispatch(empty(), path, {**MAPS["blocks on disk"], "head": "disk"})


@pytest.mark.usefixtures("through_buffers")
@pytest.mark.parametrize("way", ["auto", "balanced", "balanced_low_0", "sequential"])
def test_planned_placements_keep_within_their_limits(tmp_path: Path, way: str) -> None:
    resident = Transformer(depth=8)
    model = load_checkpoint_and_dispatch(
        empty(depth=8), save_single(resident, tmp_path), way, max_memory={"cpu": 6 * BLOCK}
    )
    stream = get_prefetcher(model)
    assert stream is not None
    with torch.no_grad():
        assert torch.equal(model(TOKENS), resident(TOKENS))
        stay = sum(t.nbytes for t in [*model.parameters(), *model.buffers()] if not t.is_meta)
    assert 0 < stay + stream.peak_bytes <= 6 * BLOCK


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_are_converted_as_they_come(tmp_path: Path, dtype: torch.dtype) -> None:
    resident = Transformer()
    model = load_checkpoint_and_dispatch(empty(), save_single(resident, tmp_path), {"": "disk"}, dtype=dtype)
    with torch.no_grad():
        assert torch.equal(model(TOKENS), resident.to(dtype)(TOKENS))


class DelayedCopyQueue:
    """A queue whose copies run as late as they may: only when somebody waits for a mark behind them."""

    def __init__(self) -> None:
        self.waiting: list[Any] = []
        self.done = 0
        self.num_pinned = 0
        self.lock = threading.RLock()

    def allocate_pinned(self, nbytes: int) -> Tensor:
        self.num_pinned += 1
        return torch.full((nbytes,), 255, dtype=torch.uint8)

    def copy(self, source: Tensor, out: Tensor) -> None:
        with self.lock:
            self.waiting.append((source, out))

    def record_copies(self) -> int:
        with self.lock:
            return self.done + len(self.waiting)

    def synchronize(self, event: int) -> None:
        with self.lock:
            while self.done < event:
                source, out = self.waiting.pop(0)
                out.copy_(source)
                self.done += 1

    compute_after = synchronize

    def copy_after(self, event: str) -> None:
        assert event == "computed"

    def record_compute(self) -> str:
        return "computed"


@pytest.mark.parametrize("places", list(MAPS))
def test_the_lane_of_a_device_keeps_order_through_its_staging(tmp_path: Path, places: str) -> None:
    resident = Transformer()
    on_disk = open_safetensors(save_single(resident, tmp_path)).tensors
    model, queue = Transformer(), DelayedCopyQueue()
    model.load_state_dict(resident.state_dict())
    lane = DeviceTransfer(torch.device("cpu"), queue, chunk_bytes=1000)
    _dispatch(model, MAPS[places], None, offload_index=on_disk, transfer=lane)
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(model(TOKENS), resident(TOKENS))
    assert queue.done > 100
    assert queue.num_pinned <= 2 * 2, "two buffers each for the reader and for the computing thread"


@pytest.mark.usefixtures("through_buffers")
def test_weights_are_read_ahead_and_buffers_bounded(tmp_path: Path) -> None:
    resident = Transformer(depth=8)
    model = load_checkpoint_and_dispatch(
        empty(depth=8), save_single(resident, tmp_path), {"": "disk"}, buffer_bytes=3 * BLOCK
    )
    stream = get_prefetcher(model)
    assert stream is not None
    with torch.no_grad():
        for _ in range(4):
            model(TOKENS)
    assert 0 < stream.peak_bytes <= 3 * BLOCK
    assert [unit.name for unit in stream._order] == [
        "", "embedding", *(f"blocks.{index}" for index in range(8)), "norm", "head"
    ]  # fmt: skip


def test_the_order_is_learnt_from_the_first_forward(tmp_path: Path) -> None:
    class Backwards(Transformer):
        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embedding(tokens) + self.positions[: tokens.shape[1]]
            for block in reversed(self.blocks):
                x = block(block(x))
            return self.head(self.norm(x))

    resident = Backwards()
    model = Backwards()
    model.load_state_dict(resident.state_dict())
    disk_offload(model, tmp_path)
    stream = get_prefetcher(model)
    assert stream is not None
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(model(TOKENS), resident(TOKENS))
    names = [unit.name for unit in stream._order if unit.name.startswith("blocks")]
    assert names == [f"blocks.{index}" for index in (3, 3, 2, 2, 1, 1, 0, 0)]


@pytest.mark.usefixtures("through_buffers")
def test_room_beyond_the_read_ahead_keeps_a_part_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel_nb.bigmodel.offload.weight_prefetch._MIN_PREFETCH_BYTES", 0)
    fills: dict[int, int] = {}
    for num_blocks in (3, 12):
        model = Transformer(depth=16, vocabulary=8)
        (tmp_path / str(num_blocks)).mkdir()
        disk_offload(model, tmp_path / str(num_blocks), buffer_bytes=num_blocks * BLOCK)
        stream = get_prefetcher(model)
        assert stream is not None
        with torch.no_grad():
            for _ in range(3):
                model(TOKENS % 8)
            before = stream.num_fills
            for _ in range(4):
                model(TOKENS % 8)
        fills[num_blocks] = stream.num_fills - before
    assert 0 < fills[12] <= fills[3] * 0.6


@pytest.mark.usefixtures("through_buffers")
def test_a_budget_of_one_unit_works_and_less_is_refused_by_name(tmp_path: Path) -> None:
    resident = Transformer()
    path = save_single(resident, tmp_path)
    needed = 4 * BLOCK
    with pytest.raises(ConfigError, match=r"blocks\.0 needs .* at once, and buffer_bytes allows 1000 B: .* too little"):
        load_checkpoint_and_dispatch(empty(), path, {"": "disk"}, buffer_bytes=1000)
    model = load_checkpoint_and_dispatch(empty(), path, {"": "disk"}, buffer_bytes=BLOCK)
    with torch.no_grad():
        assert torch.equal(model(TOKENS), resident(TOKENS))
    stream = get_prefetcher(model)
    assert stream is not None
    assert stream.peak_bytes <= needed


@pytest.mark.usefixtures("way")
def test_several_forwards_at_once(tmp_path: Path) -> None:
    resident = Transformer(depth=8)
    model = load_checkpoint_and_dispatch(empty(depth=8), save_single(resident, tmp_path), {"": "disk"})
    inputs = [torch.randint(64, (2, 3 + index % 9)) for index in range(24)]

    def run(tokens: Tensor) -> Tensor:
        with torch.no_grad():
            return model(tokens)

    with ThreadPoolExecutor(4) as pool:
        outputs = list(pool.map(run, inputs))
    with torch.no_grad():
        assert all(torch.equal(output, resident(tokens)) for output, tokens in zip(outputs, inputs, strict=True))
    stream = get_prefetcher(model)
    assert stream is not None
    assert all(parameter.is_meta for parameter in model.parameters()), "nothing is left in place"


class Adapted(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def adapted() -> Transformer:
    torch.manual_seed(3)
    model = Transformer(width=64).requires_grad_(False)
    for block in model.blocks:
        block.up = Adapted(block.up)  # type: ignore[arg-type,assignment]
        block.up.requires_grad_(True).base.requires_grad_(False)
    return model


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("budget", [None, "just one"])
def test_adapters_stay_and_train_as_if_all_weights_were_there(tmp_path: Path, budget: str | None) -> None:
    resident, model = adapted(), adapted()
    largest = compute_module_sizes(model)["blocks.0"]
    disk_offload(model, tmp_path, buffer_bytes=largest if budget else None)
    assert not model.blocks[0].up.down.weight.is_meta
    assert model.blocks[0].up.base.weight.is_meta
    for own in (resident, model):
        optimizer = torch.optim.AdamW([p for p in own.parameters() if p.requires_grad], lr=0.01)
        for _ in range(3):
            loss = own(TOKENS).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    for (name, expected), (_, parameter) in zip(resident.named_parameters(), model.named_parameters(), strict=True):
        if expected.requires_grad:
            assert torch.equal(parameter, expected), name


@pytest.mark.usefixtures("way")
def test_gradients_pass_through_weights_that_are_away(tmp_path: Path) -> None:
    resident = Transformer()
    model = load_checkpoint_and_dispatch(empty(), save_single(resident, tmp_path), {"": "disk"}, buffer_bytes=BLOCK)
    grads = []
    for own in (resident, model):
        x = torch.linspace(-1, 1, 32 * 6).reshape(1, 6, 32).requires_grad_()
        y = x
        for block in own.blocks:  # type: ignore[union-attr]
            y = block(y)
        y.sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("in_place", torch.zeros(2))
        self.register_buffer("replaced", torch.zeros(2))
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.in_place += 1
        self.replaced = self.replaced + self.in_place
        return self.linear(self.norm(x)) + self.replaced.sum()


@pytest.mark.usefixtures("way")
def test_what_a_forward_changes_is_kept(tmp_path: Path) -> None:
    model, resident = Counting(), Counting()
    resident.load_state_dict(model.state_dict())
    disk_offload(model, tmp_path, offload_buffers=True, buffer_bytes=400)
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(8, 4)
            assert torch.equal(model(x), resident(x))
    assert model.in_place.is_meta
    assert all(torch.equal(value, resident.state_dict()[name]) for name, value in offloaded_weights(model))


def test_a_buffer_replaced_by_one_of_another_shape_is_an_error(tmp_path: Path) -> None:
    class Growing(Counting):
        def forward(self, x: Tensor) -> Tensor:
            self.replaced = torch.zeros(3)
            return x

    model = disk_offload(Growing(), tmp_path, offload_buffers=True)
    with pytest.raises(MisuseError, match="has replaced the offloaded replaced by"):
        model(torch.ones(1, 4))


def test_modules_that_use_weights_of_their_parts(tmp_path: Path) -> None:
    resident = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 3).eval()
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 3).eval()
    model.load_state_dict(resident.state_dict())
    disk_offload(model, tmp_path)
    x = torch.randn(2, 5, 16)
    with torch.no_grad():
        assert torch.equal(model(x), resident(x))
    attention = nn.MultiheadAttention(16, 2)
    kept = {name: value.clone() for name, value in attention.state_dict().items()}
    disk_offload(attention, tmp_path)
    again = nn.MultiheadAttention(16, 2)
    again.load_state_dict(kept)
    assert torch.equal(attention(x, x, x)[0], again(x, x, x)[0])


def test_lists_of_parameters_are_loaded_for_the_module_that_uses_them(tmp_path: Path) -> None:
    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
            self.scales = nn.ParameterList(torch.rand(4) for _ in range(2))
            self.shifts = nn.ModuleDict({"own": nn.ParameterDict({"first": nn.Parameter(torch.rand(4))})})

        def forward(self, x: Tensor) -> Tensor:
            for layer, scale in zip(self.layers, self.scales, strict=True):
                x = layer(x) * scale
            return x + self.shifts["own"]["first"]

    model, x = nn.Sequential(Mixture(), nn.Linear(4, 2)), torch.randn(3, 4)
    expected = model(x)
    disk_offload(model, tmp_path)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert torch.equal(model(x), expected)


@pytest.mark.usefixtures("way")
def test_a_part_of_a_block_computes_by_itself_too(tmp_path: Path) -> None:
    resident = Transformer()
    model = load_checkpoint_and_dispatch(empty(), save_single(resident, tmp_path), {"": "disk"})
    x = torch.randn(2, 3, resident.blocks[1].up.in_features)
    expected = resident.blocks[1].down(resident.blocks[1].up(x))
    assert torch.equal(model.blocks[1].down(model.blocks[1].up(x)), expected)
    assert model.blocks[1].up.weight.is_meta
    assert torch.equal(model(TOKENS), resident(TOKENS))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("is_called_outside", [False, True])
def test_a_layer_of_several_blocks_is_loaded_with_each(tmp_path: Path, is_called_outside: bool) -> None:
    class Block(nn.Module):
        def __init__(self, shared: nn.Module) -> None:
            super().__init__()
            self.own, self.shared = nn.Linear(4, 4), shared

        def forward(self, x: Tensor) -> Tensor:
            return functional.linear(self.shared(self.own(self.shared(x))), self.shared.weight)

    shared = nn.Linear(4, 4)
    model = nn.Sequential(Block(shared), Block(shared), *([shared] if is_called_outside else []))
    x = torch.randn(3, 4)
    expected, alone = model(x), shared(x)
    disk_offload(model, tmp_path)
    for _ in range(2):
        assert torch.equal(model(x), expected)
        assert torch.equal(shared(x), alone)
    assert shared.weight.is_meta
    remove_hook_from_submodules(model)
    assert torch.equal(model(x), expected)


def test_weights_come_back_and_the_model_is_ordinary_again(tmp_path: Path) -> None:
    resident, model = Transformer(), Transformer()
    model.load_state_dict(resident.state_dict())
    disk_offload(model, tmp_path)
    assert has_offloaded_params(model)
    with pytest.raises(MisuseError, match="dispatched already"):
        disk_offload(model, tmp_path)
    assert all(torch.equal(value, resident.state_dict()[name]) for name, value in offloaded_weights(model))

    remove_hook_from_submodules(model)

    assert not has_offloaded_params(model)
    assert model.head.weight is model.embedding.weight
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert "forward" not in model.__dict__
    assert all(torch.equal(value, resident.state_dict()[name]) for name, value in model.state_dict().items())
    model(TOKENS).sum().backward()


def test_offloading_to_memory_for_the_cpu_leaves_weights_alone() -> None:
    model = Transformer()
    before = dict(model.named_parameters())
    cpu_offload(model, "cpu")
    assert all(before[name] is parameter for name, parameter in model.named_parameters())
    assert not has_offloaded_params(model)


def test_a_model_that_is_dropped_leaves_nothing_running(tmp_path: Path) -> None:
    model = disk_offload(Transformer(), tmp_path)
    with torch.no_grad():
        model(TOKENS)
    gone = weakref.ref(get_prefetcher(model))
    del model
    assert wait_for(lambda: gc.collect() >= 0 and gone() is None)


@pytest.mark.usefixtures("way")
def test_an_error_in_a_forward_leaves_no_weights_behind(tmp_path: Path) -> None:
    resident = Transformer()
    model = load_checkpoint_and_dispatch(empty(), save_single(resident, tmp_path), {"": "disk"})
    with torch.no_grad():
        for _ in range(3):
            with pytest.raises(IndexError):
                model(torch.tensor([[1000]]))
            assert torch.equal(model(TOKENS), resident(TOKENS))
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.usefixtures("way")
def test_an_interrupt_leaves_no_weights_behind(tmp_path: Path) -> None:
    resident = Transformer()
    model = load_checkpoint_and_dispatch(empty(), save_single(resident, tmp_path), {"": "disk"})

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    handle = model.blocks[1].up.register_forward_pre_hook(interrupt)  # type: ignore[union-attr]
    with torch.no_grad(), pytest.raises(KeyboardInterrupt):
        model(TOKENS)
    handle.remove()
    assert all(parameter.is_meta for parameter in model.parameters())
    with torch.no_grad():
        assert torch.equal(model(TOKENS), resident(TOKENS))


@pytest.mark.usefixtures("way")
def test_files_removed_while_open_are_still_read_and_files_cut_short_are_an_error(tmp_path: Path) -> None:
    resident = Transformer()
    path = save_single(resident, tmp_path)
    model = load_checkpoint_and_dispatch(empty(), path, {"": "disk"}, buffer_bytes=BLOCK)
    copy = shutil.copy(path, tmp_path / "copy")
    with torch.no_grad():
        model(TOKENS)
        os.truncate(path, 1000)
        with pytest.raises(OffloadError, match=r"cannot be read: .*truncated while in use"):
            model(TOKENS)
        with open(path, "wb") as file:  # put right, it works again
            file.write(Path(copy).read_bytes())
        assert torch.equal(model(TOKENS), resident(TOKENS))
        path.unlink()
        assert torch.equal(model(TOKENS), resident(TOKENS))


def test_a_folder_that_cannot_be_written_is_an_error_and_the_model_stays(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    model = Transformer()
    with pytest.raises(OffloadError, match="cannot be written to offload_dir"):
        disk_offload(model, tmp_path / "file" / "folder")
    assert not any(parameter.is_meta for parameter in model.parameters())


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(tensors: object, path: Path) -> None:
        Path(path).write_bytes(b"half")
        with open("/dev/full", "wb", buffering=0) as file:
            file.write(b"more")

    monkeypatch.setattr("accel_nb.bigmodel.offload.dispatch.save_file", full)
    with pytest.raises(OffloadError, match="No space left"):
        disk_offload(Transformer(), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_all_problems_of_a_dispatch_are_reported_at_once() -> None:
    model = empty()
    model.norm = nn.LayerNorm(32)
    with pytest.raises(ConfigError) as caught:
        dispatch_model(model, {"": "disk"})
    assert len(caught.value.problems) == 2
    assert "have no value: positions, embedding.weight" in str(caught.value)
    assert "offload_dir is not given: norm.weight" in str(caught.value)
    with pytest.raises(ConfigError, match="this machine has"):
        dispatch_model(Transformer(), {"": 99})


def test_a_weight_in_memory_is_copied_from_there() -> None:
    out = torch.empty(3, dtype=torch.float16)
    HostTensor(torch.ones(3)).read_into(out)
    assert out.tolist() == [1, 1, 1]
    assert CHUNK_BYTES > 0


LIMITED = """
import resource, sys, torch
from accel_nb.bigmodel.offload.weight_transfer import HostTransfer
from accel_nb.bigmodel.loading.load import load_checkpoint_and_dispatch
from accel_nb.bigmodel.meta import init_empty_weights
from tests.support.memory import peak_bytes
from tests.support.transformer import Transformer
torch.set_num_threads(1)
with init_empty_weights():
    model = Transformer(width=640, depth=14, vocabulary=512, length=32)
torch.nn.functional.linear(torch.randn(64, 64), torch.randn(64, 64))
size = sum(parameter.nbytes for parameter in model.parameters())
used = int(next(line for line in open("/proc/self/status") if line.startswith("VmData")).split()[1]) * 1024
limit = used + size // 2
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
try:
    torch.ones(size, dtype=torch.uint8)
except RuntimeError:
    print("the limit holds")
before = peak_bytes()
model = load_checkpoint_and_dispatch(model, sys.argv[1], {"": "disk"})
tokens = torch.arange(4)[None]
with torch.inference_mode():
    for step in range(4):
        if step == 2:
            HostTransfer.can_lease = lambda *_, **__: False  # from here on through buffers
        tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], 1)
grown = peak_bytes() - before
assert grown < size // 2, (grown, size)
print(tokens.tolist())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")
def test_a_model_larger_than_the_memory_limit_generates(tmp_path: Path, project: Path) -> None:
    resident = Transformer(width=640, depth=14, vocabulary=512, length=32)
    save_single(resident, tmp_path)
    tokens = torch.arange(4)[None]
    with torch.inference_mode():
        for _ in range(4):
            tokens = torch.cat([tokens, resident(tokens)[:, -1:].argmax(-1)], 1)
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path)],
        capture_output=True, text=True, check=False, cwd=project, env={**os.environ, "PYTHONPATH": str(project)},
    )  # fmt: skip
    assert done.stdout.splitlines() == ["the limit holds", str(tokens.tolist())], done.stderr
    assert done.returncode == 0, done.stderr  # it has left while blocks were being read


@pytest.mark.usefixtures("through_buffers")
def test_readers_end_before_the_interpreter_does(tmp_path: Path) -> None:
    resident, model = Transformer(width=128, depth=6), Transformer(width=128, depth=6)
    model.load_state_dict(resident.state_dict())
    stream = get_prefetcher(disk_offload(model, tmp_path))
    assert stream is not None
    assert stream.stop_readers.atexit
    with torch.no_grad():
        model(TOKENS)
        stream.stop_readers()
        assert not [thread for thread in threading.enumerate() if thread in stream._readers]
        assert torch.equal(model(TOKENS), resident(TOKENS)), "what is needed is read when it is needed"
