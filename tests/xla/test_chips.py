"""One process that drives four chips as one device."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch_xla
import torch_xla.debug.metrics as metrics
import torch_xla.runtime as xr
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch_xla.distributed.spmd import XLAShardedTensor

from accel_nb.accelerator import Accelerator
from accel_nb.errors import ConfigError
from accel_nb.runtime.world import World
from accel_nb.telemetry.events import Event, MemorySample, StepDone
from tests.contract.recipes import Recipe, assert_equal_weights, by_hand, explicit, plain, weights_of

CHIPS = 4
RECIPES = [
    Recipe(num_samples=24, batch=8),
    Recipe(num_samples=23, batch=8, accumulate=2, clip=0.3, scheduler=True),
    Recipe(num_samples=13, batch=4, optimizer="adamw", accumulate=3, scheduler=True),
    Recipe(num_samples=23, batch=8, reduction="sum"),
]


def shards_of(tensor: Tensor) -> list[tuple[int, ...]]:
    """Return the shape of what each chip holds of a tensor; one that is not divided is on each of them whole."""
    if not torch_xla._XLAC._get_xla_sharding_spec(tensor):
        return [tuple(tensor.shape)] * CHIPS
    return [tuple(shard.data.shape) for shard in XLAShardedTensor(tensor.detach()).local_shards]


class Seen:
    """Keeps events."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)


@pytest.mark.parametrize("shard_params", [False, True])
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_weights_equal_those_of_one_plain_process(recipe: Recipe, shard_params: bool) -> None:
    expected = by_hand(recipe)
    config = {"xla": {"shard_params": shard_params}}
    assert_equal_weights(explicit(World(), recipe, strategy="xla", config=config), expected)


def test_a_plain_cell_trains_equally() -> None:
    for recipe, zero_first in itertools.product(RECIPES[:2], (False, True)):
        found = plain(World(), recipe, strategy="xla", zero_first=zero_first)
        assert_equal_weights(found, by_hand(recipe))


def test_bf16_computes_in_bf16_and_keeps_weights() -> None:
    recipe = Recipe(num_samples=24, batch=8, precision="bf16")
    assert_equal_weights(explicit(World(), recipe, strategy="xla"), by_hand(recipe), atol=5e-3)
    accelerator = Accelerator(world=World(), strategy="xla", mixed_precision="bf16")
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    seen: list[torch.dtype] = []
    model[1].register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].dtype))
    accelerator.prepare(model)
    output = model(torch.ones(2, 4, device=accelerator.device))
    assert (seen, output.dtype, model[0].weight.dtype) == ([torch.bfloat16], torch.float32, torch.float32)
    accelerator.close()


def test_fp16_is_refused_with_what_to_use() -> None:
    with pytest.raises(ConfigError, match=r"fp16 cannot run under the strategy 'xla'.*bf16"):
        Accelerator(world=World(), strategy="xla", mixed_precision="fp16")


def data(num_samples: int, batch: int) -> DataLoader[Any]:
    torch.manual_seed(5)
    return DataLoader(TensorDataset(torch.randn(num_samples, 8), torch.randint(4, (num_samples,))), batch_size=batch)


def parts(shard_params: bool = False, sink: Any = None, **options: Any) -> tuple[Any, ...]:
    loader = data(64, 8)
    torch.manual_seed(6)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    config = {"xla": {"shard_params": shard_params}, "clip": 0.5}
    accelerator = Accelerator(world=World(), strategy="xla", config=config, sink=sink, **options)
    accelerator.prepare(model, optimizer, scheduler, loader)
    return accelerator, model, optimizer, scheduler, loader


def train(accelerator: Any, model: Any, optimizer: Any, scheduler: Any, loader: Any) -> Iterator[Tensor]:
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        yield loss


def test_each_chip_has_its_share_of_a_batch_and_a_short_one_whole() -> None:
    accelerator, *_ = parts()
    loader = accelerator.prepare(data(14, 8))
    assert xr.is_spmd()
    assert xr.global_runtime_device_count() == CHIPS
    shapes = []
    for x, _ in loader:
        torch_xla.sync()
        shapes.append(shards_of(x))
    assert shapes[0] == [(2, 8)] * CHIPS
    assert shapes[1] == [(6, 8)] * CHIPS
    accelerator.close()


def test_parameters_gradients_and_optimizer_state_are_divided_where_asked() -> None:
    accelerator, model, optimizer, scheduler, loader = parts(shard_params=True)
    assert len(list(itertools.islice(train(accelerator, model, optimizer, scheduler, loader), 3))) == 3
    weight = model[0].weight
    assert shards_of(weight) == [(4, 8)] * CHIPS
    assert shards_of(optimizer.state[weight]["exp_avg"]) == [(4, 8)] * CHIPS
    x, y = (part.to(accelerator.device) for part in loader.dataset[:8])
    accelerator.backward(nn.functional.cross_entropy(model(x), y))
    torch_xla.sync(wait=True)
    assert shards_of(weight.grad) == [(4, 8)] * CHIPS
    assert "shard_params True" in accelerator.describe()["notes"]
    accelerator.close()


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("shard_params", [False, True])
def test_nothing_is_compiled_after_the_first_steps(shard_params: bool, accumulate: int) -> None:
    items = parts(shard_params, gradient_accumulation_steps=accumulate)
    first = len(list(train(*items)))
    before = metrics.counter_value("UncachedCompile")
    assert len(list(train(*items))) + len(list(train(*items))) == 2 * first == 16
    assert metrics.counter_value("UncachedCompile") == before
    items[0].close()


def test_losses_are_reported_in_order_and_whole() -> None:
    seen = Seen()
    accelerator, *rest = parts(sink=seen)
    losses = [loss.item() for loss in train(accelerator, *rest)]
    accelerator.close()
    steps = [event for event in seen.events if isinstance(event, StepDone)]
    assert [event.step for event in steps] == list(range(1, 9))
    assert [event.loss for event in steps] == pytest.approx(losses)
    memory = next(event for event in seen.events if isinstance(event, MemorySample))
    assert memory.parameters == 4 * sum(value.numel() for value in rest[0].parameters())


def go_on(path: str, strategy: str) -> dict[str, Tensor]:
    """Load a checkpoint under a strategy, and train on to the end of the epoch."""
    loader = data(64, 8)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    config = {"xla": {"shard_params": True}, "clip": 0.5}
    accelerator = Accelerator(world=World(), strategy=strategy, config=config)
    accelerator.prepare(model, optimizer, scheduler, loader)
    accelerator.load_state(path)
    for _ in train(accelerator, model, optimizer, scheduler, loader):
        pass
    accelerator.close()
    return weights_of(model)


@pytest.mark.parametrize("shard_params", [False, True])
def test_a_checkpoint_goes_on_under_this_strategy_and_another(tmp_path: Any, shard_params: bool) -> None:
    items = parts(shard_params)
    losses = train(*items)
    for _ in itertools.islice(losses, 3):
        pass
    items[0].save_state(tmp_path / "halfway")
    for _ in losses:
        pass
    items[0].close()
    expected = weights_of(items[1])
    for strategy in ("xla", "single"):
        assert_equal_weights(go_on(str(tmp_path / "halfway"), strategy), expected, atol=1e-4)


def test_what_another_strategy_saved_goes_on_here(tmp_path: Any) -> None:
    loader = data(64, 8)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    accelerator = Accelerator(world=World(), strategy="single", config={"clip": 0.5})
    accelerator.prepare(model, optimizer, scheduler, loader)
    losses = train(accelerator, model, optimizer, scheduler, loader)
    for _ in itertools.islice(losses, 3):
        pass
    accelerator.save_state(tmp_path / "halfway")
    for _ in losses:
        pass
    accelerator.close()
    assert_equal_weights(go_on(str(tmp_path / "halfway"), "xla"), weights_of(model), atol=1e-4)


def test_tied_weights_stay_one_and_are_saved_once(tmp_path: Any) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(512, 64)
            self.head = nn.Linear(64, 512, bias=False)
            self.head.weight = self.table.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.table(x))

    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerator = Accelerator(world=World(), strategy="xla")
    accelerator.prepare(model, optimizer)
    assert model.head.weight is model.table.weight
    accelerator.backward(model(torch.arange(8, device=accelerator.device)).square().mean())
    optimizer.step()
    accelerator.save_state(tmp_path / "tied")
    stored = sum(path.stat().st_size for path in (tmp_path / "tied").rglob("*.safetensors"))
    assert 512 * 64 * 4 < stored < 512 * 64 * 4 * 1.5
    accelerator.close()


def test_dropout_repeats_with_the_seed_and_after_a_load(tmp_path: Any) -> None:
    def draw(accelerator: Accelerator) -> list[float]:
        return nn.functional.dropout(torch.ones(32, device=accelerator.device)).tolist()

    accelerator = Accelerator(world=World(), strategy="xla", seed=3)
    accelerator.save_state(tmp_path / "start")
    first = [draw(accelerator), draw(accelerator)]
    assert first[0] != first[1]
    accelerator.load_state(tmp_path / "start")
    assert [draw(accelerator), draw(accelerator)] == first
    accelerator.close()
    again = Accelerator(world=World(), strategy="xla", seed=3)
    again.save_state(tmp_path / "again")
    assert [draw(again), draw(again)] == first
    again.close()
