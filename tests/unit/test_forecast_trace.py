"""Traced steps against real ones: the allocator's own record of a training step, and the state of real optimizers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from accel_nb.errors import MisuseError
from accel_nb.forecast.measurement import default_loss, measure_activations, measure_model
from accel_nb.forecast.model_building import forecast_model
from accel_nb.forecast.plans import RunSetting
from accel_nb.forecast.sizes import OPTIMIZERS, with_optimizer
from accel_nb.strategies.fsdp.wrap_policy import repeated_blocks
from tests.support.measured import held_bytes, peak_bytes
from tests.support.nightly import nightly
from tests.support.transformer import Transformer


class Encoder(nn.Module):
    """torch's own transformer, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
        self.embedding = nn.Embedding(100, 64)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(64, 100)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(tokens)))


def perceptron() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    layers = [part for _ in range(6) for part in (nn.Linear(128, 128), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(128, 10)), (torch.randn(512, 128), torch.randint(10, (512,)))


def convolutions() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    model = nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)),
    )
    return model, (torch.randn(32, 3, 32, 32), torch.randint(10, (32,)))


def encoder() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    return Encoder(), (torch.randint(100, (16, 32)), torch.randint(100, (16, 32)))


def language() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    return Transformer(256, 64, 4, 64), (torch.randint(256, (8, 64)), torch.randint(256, (8, 64)))


def regression() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    layers = nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)
    return nn.Sequential(*layers), (torch.randn(1024, 256), torch.randn(1024, 256))


MAKERS = [perceptron, convolutions, encoder, nightly(language), nightly(regression)]


def recompute(block: nn.Module) -> None:
    forward = block.forward
    block.forward = lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)


def real_peak(model: nn.Module, batch: tuple[Tensor, Tensor], half: torch.dtype | None) -> int:
    """Return what a step takes beside weights and gradients: the gradients' places are there before it starts."""

    def step() -> None:
        x, y = batch[0].clone(), batch[1].clone()
        with nullcontext() if half is None else torch.autocast("cpu", half):
            output = model(x)
        default_loss(output.float(), (x, y)).backward()

    step()
    return peak_bytes(step)


@pytest.mark.parametrize("checkpoints", [False, nightly(True)], ids=["kept", "recomputed"])
@pytest.mark.parametrize("half", [nightly(None), torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("make", MAKERS)
def test_activations_are_within_a_quarter_of_what_a_real_step_takes(
    make: Callable[[], Any], half: torch.dtype | None, checkpoints: bool
) -> None:
    model, batch = make()
    traced = measure_activations(model, batch, len(batch[0]), half=half, checkpoints=checkpoints)
    if checkpoints:
        for block in repeated_blocks(model).values():
            recompute(block)
    real = real_peak(model, batch, half)
    assert traced.num_bytes + traced.weight_copies == pytest.approx(real, rel=0.25)


@pytest.mark.parametrize(
    "loss",
    [
        nn.functional.mse_loss,
        nn.functional.smooth_l1_loss,
        nn.functional.huber_loss,
        nn.functional.l1_loss,
        nn.functional.binary_cross_entropy,
        nn.functional.binary_cross_entropy_with_logits,
        lambda x, y: nn.functional.mse_loss(x, y, reduction="none").mean(),
    ],
)
def test_a_loss_holds_what_its_kernel_holds(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    model, batch = nn.Sequential(nn.Linear(4, 4096), nn.Sigmoid()), (torch.randn(64, 4), torch.rand(64, 4096))

    def step() -> None:
        x, y = batch[0].clone(), batch[1].clone()
        loss(model(x), y).backward()

    step()
    traced = measure_activations(model, batch, 64, loss=lambda output, batch: loss(output, batch[1]))
    assert traced.num_bytes == pytest.approx(peak_bytes(step), rel=0.05)


@pytest.mark.parametrize("make", [nightly(encoder), language])
def test_recomputing_blocks_is_forecast_to_help_as_much_as_it_does(make: Callable[[], Any]) -> None:
    model, batch = make()
    kept = measure_activations(model, batch, len(batch[0])).num_bytes
    again = measure_activations(model, batch, len(batch[0]), checkpoints=True).num_bytes
    before = real_peak(model, batch, None)
    for block in repeated_blocks(model).values():
        recompute(block)
    after = real_peak(model, batch, None)
    assert after < 0.5 * before
    assert again / kept == pytest.approx(after / before, rel=0.1)


def test_a_cast_model_keeps_no_copies_of_its_weights() -> None:
    model, batch = language()
    traced = measure_activations(model, batch, 8, half=torch.bfloat16)
    assert traced.cast_bytes is not None
    real = real_peak(model.to(torch.bfloat16), batch, None)
    assert traced.cast_bytes == pytest.approx(real, rel=0.25)
    copies = sum(weight.nbytes for weight in model.parameters())
    assert 0.5 * copies < traced.weight_copies <= copies


def test_a_model_that_cannot_be_cast_is_known_under_autocast() -> None:
    class Insists(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            if self.layer.weight.dtype is not torch.float32:
                raise TypeError("the weights have to be float32")
            return self.layer(x)

    traced = measure_activations(Insists(), torch.randn(4, 8), 4, half=torch.bfloat16)
    assert traced.num_bytes > 0
    assert traced.cast_bytes is None


def test_the_batch_s_own_size_does_not_matter() -> None:
    model, batch = language()
    small = tuple(part[:1] for part in batch)
    assert measure_activations(model, small, 8) == measure_activations(model, batch, 8)
    assert measure_activations(model, small, 16).num_bytes > 1.8 * measure_activations(model, small, 8).num_bytes


def test_a_gpu_s_kernels_keep_less() -> None:
    """Attention there keeps no weights when it drops some out, and a mask takes one byte; neither computes on a GPU."""
    model, batch = encoder()
    on_cpu, on_gpu = (measure_activations(model, batch, 16, on_gpu=where).num_bytes for where in (False, True))
    layers, tokens, pairs, width, itemsize = 4, 16 * 32, 16 * 4 * 32 * 32, 64, 4
    masks = (width + 4 * width + width) * tokens * (itemsize - 1)
    attention = (3 * pairs + 2 * tokens * width) * itemsize  # weights, mask, what is left; scaled queries and keys
    assert on_cpu - on_gpu == pytest.approx(layers * (masks + attention), rel=0.05)


def test_a_model_that_was_evaluated_last_is_traced_as_training() -> None:
    model, batch = encoder()
    training = measure_activations(model, batch, 16)
    assert measure_activations(model.eval(), batch, 16) == training
    assert not model.training


def test_the_notebook_s_defaults_do_not_matter() -> None:
    model, batch = encoder()
    expected = measure_activations(model, batch, 16)
    torch.set_default_device("meta")
    torch.set_grad_enabled(False)
    try:
        assert measure_activations(model, batch, 16) == expected
    finally:
        torch.set_grad_enabled(True)
        torch.set_default_device(None)


def test_tracing_leaves_everything_as_it_was() -> None:
    model, batch = encoder()
    optimizer = torch.optim.AdamW(model.parameters())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    versions = [value._version for value in model.parameters()]
    generator = torch.get_rng_state()
    forwards = [module.__dict__.get("forward") for module in model.modules()]
    measure_activations(model, batch, 4, half=torch.bfloat16, checkpoints=True, on_gpu=True)
    measure_model(model, optimizer, on_gpu=True)
    assert torch.equal(torch.get_rng_state(), generator)
    assert [value._version for value in model.parameters()] == versions
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not optimizer.state
    assert [module.__dict__.get("forward") for module in model.modules()] == forwards


def test_a_number_that_the_forward_reads_does_not_stop_it() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) / max(1.0, x.abs().max().item())

    batch = torch.randn(4, 8)
    assert measure_activations(Reads(), batch, 4).num_bytes > 0


def test_a_forward_that_needs_values_is_named_in_one_line() -> None:
    class Chooses(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("only\nfor the brave")

    with pytest.raises(MisuseError, match=r"^Chooses cannot be run on shapes alone: ValueError: only$"):
        measure_activations(Chooses(), torch.randn(2, 2), 2)


@pytest.mark.parametrize(
    ("output", "target", "expected"),
    [
        (torch.randn(4, 3), torch.randint(3, (4,)), "cross_entropy"),
        (torch.randn(4, 5, 3), torch.randint(3, (4, 5)), "cross_entropy"),
        (torch.randn(4, 3, 5, 5), torch.randint(3, (4, 5, 5)), "cross_entropy"),
        (torch.randn(4, 3), torch.randn(4, 3), "mse"),
        (torch.randn(4, 3), None, "sum"),
    ],
)
def test_the_loss_is_distinguished_from_shapes(output: Tensor, target: Tensor | None, expected: str) -> None:
    output = output.requires_grad_()
    loss = default_loss(output, output if target is None else (output, target))
    names = {"cross_entropy": "NllLoss", "mse": "MseLoss", "sum": "Sum"}
    assert names[expected] in type(loss.grad_fn).__name__


def test_a_model_s_own_loss_is_taken() -> None:
    own = torch.ones((), requires_grad=True)
    assert default_loss({"logits": torch.randn(3), "loss": own}, {}) is own


OPTIMIZER_MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda values: torch.optim.SGD(values, lr=0.1),
    "sgd-momentum": lambda values: torch.optim.SGD(values, lr=0.1, momentum=0.9),
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "amsgrad": lambda values: torch.optim.AdamW(values, amsgrad=True),
    "adafactor": torch.optim.Adafactor,
    "nadam": torch.optim.NAdam,
    "rprop": torch.optim.Rprop,
}


@pytest.mark.parametrize("has_stepped", [nightly(False), True])
@pytest.mark.parametrize("name", ["sgd", "adamw", "adafactor", *map(nightly, [*OPTIMIZER_MAKERS][1:])])
def test_parameters_gradients_and_state_are_those_of_a_real_step(name: str, has_stepped: bool) -> None:
    model, batch = language()
    optimizer = OPTIMIZER_MAKERS[name](model.parameters())

    def train() -> None:
        default_loss(model(batch[0]), batch).backward()
        optimizer.step()

    if has_stepped:
        train()
    found = measure_model(model, optimizer)
    setting = RunSetting(1, "cpu", 2**34, 2**34, uses_host_memory=True)
    usage = forecast_model(model, setting, optimizer=optimizer).plans[0].usage
    train()
    assert {part: getattr(usage, part) for part in ("parameters", "gradients", "optimizer")} == pytest.approx(
        held_bytes(model, optimizer), rel=0.01
    )
    if name in OPTIMIZERS:
        by_name = with_optimizer(measure_model(model), name)
        for known, traced in zip(by_name.weights, found.weights, strict=True):
            assert abs(known.state_bytes - traced.state_bytes) <= 4  # torch counts steps in a float


@pytest.mark.parametrize("name", [nightly("adagrad"), nightly("rmsprop"), nightly("adam"), "adamw"])
def test_what_a_step_takes_for_a_moment_is_what_it_really_takes(name: str) -> None:
    model, batch = language()
    optimizer = OPTIMIZER_MAKERS[name](model.parameters())
    for group in optimizer.param_groups:
        group["foreach"] = True
    default_loss(model(batch[0]), batch).backward()
    optimizer.step()
    real = peak_bytes(optimizer.step)
    assert with_optimizer(measure_model(model), name).step_bytes == pytest.approx(real, rel=0.1)
    assert measure_model(model, optimizer).step_bytes == pytest.approx(real, rel=0.1)
    assert measure_model(model, OPTIMIZER_MAKERS[name](model.parameters()), on_gpu=True).step_bytes == pytest.approx(
        real, rel=0.1
    )


def test_only_trained_weights_count_and_ties_count_once() -> None:
    model, batch = language()
    for parameter in model.blocks.parameters():
        parameter.requires_grad_(False)
    optimizer = torch.optim.AdamW([value for value in model.parameters() if value.requires_grad])
    setting = RunSetting(1, "cpu", 2**34, 2**34, uses_host_memory=True)
    usage = forecast_model(model, setting, optimizer=optimizer).plans[0].usage
    default_loss(model(batch[0]), batch).backward()
    optimizer.step()
    real = held_bytes(model, optimizer)
    assert (usage.parameters, usage.gradients) == (real["parameters"], real["gradients"])
    assert usage.optimizer == pytest.approx(real["optimizer"], rel=0.01)


def test_each_of_several_optimizers_counts_for_what_it_steps() -> None:
    model, batch = language()
    optimizers = (
        torch.optim.AdamW(model.blocks.parameters()),
        torch.optim.SGD(model.embedding.parameters(), 0.1, momentum=0.9),
    )
    setting = RunSetting(1, "cpu", 2**34, 2**34, uses_host_memory=True)
    found = forecast_model(model, setting, optimizer=optimizers)
    default_loss(model(batch[0]), batch).backward()
    for optimizer in optimizers:
        optimizer.step()
    real = sum(held_bytes(model, optimizer)["optimizer"] for optimizer in optimizers)
    assert found.plans[0].usage.optimizer == pytest.approx(real, rel=0.01)
    assert found.model.optimizer == "AdamW and SGD"
    alone = [measure_model(model, optimizer).step_bytes for optimizer in optimizers]
    assert found.model.step_bytes == max(alone)  # they step one after the other


def test_an_optimizer_that_cannot_be_traced_counts_as_adamw_and_says_so() -> None:
    model, _ = language()
    optimizer = torch.optim.LBFGS(model.parameters())
    found = forecast_model(model, RunSetting(1, "cpu", 2**34, 2**34, uses_host_memory=True), optimizer=optimizer)
    assert any("LBFGS" in note and "counted as adamw" in note for note in found.notes)
