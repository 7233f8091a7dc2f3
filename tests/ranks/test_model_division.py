"""Plain cells whose models compute rows of whole batches: weights and printed values are those of one device."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from accel_nb.accelerator import Accelerator
from accel_nb.accelerator.plain_cells.autoprepare import PlainCells
from accel_nb.runtime.world import World
from tests.ranks.argument_programs import OF_ARGUMENTS
from tests.ranks.changed_programs import CHANGED
from tests.ranks.launch import run_ranks
from tests.ranks.recorded_run import Run, Values, loader, mlp, sgd, squared, train
from tests.ranks.undivided_programs import UNDIVIDED
from tests.support.nightly import nightly


def batch_norm(run: Run) -> None:
    train(run, mlp(nn.BatchNorm1d(10)), squared)


def batch_norm_of_images(run: Run) -> None:
    body = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4, momentum=None), nn.ReLU(), nn.Flatten())
    model = nn.Sequential(nn.Unflatten(1, (1, 2, 3)), body, nn.Linear(24, 1)).double()
    train(run, model, squared)
    model.eval()
    with torch.no_grad():
        for x, _, _ in loader():
            run.print(model(x).norm())


def batch_norm_of_centred_values(run: Run) -> None:
    """Normalize what a linear layer computes from normalized values, as in MobileNet: its means are rounding."""

    class Counting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            run.row_counts.write(f"{len(x)} ")
            return x

    norms = (nn.BatchNorm1d(10), nn.Linear(10, 10, bias=False), nn.BatchNorm1d(10))
    train(run, nn.Sequential(Counting(), mlp(*norms)), squared, loader(num_samples=24))


def penalty_through_batch_norm(run: Run) -> None:
    def loss_of(model: nn.Module, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return F.mse_loss(out, y) + ((slope.norm(dim=1) - 1) ** 2).mean()

    train(run, mlp(nn.BatchNorm1d(10)), loss_of)


def dropout(run: Run) -> None:
    train(run, mlp(nn.Dropout(0.4)), squared)


def random_slopes_in_evaluation(run: Run) -> None:
    """`RReLU` draws random numbers in training only."""
    train(run, mlp(nn.RReLU()).eval(), squared)
    run.print(torch.rand(()))


def functional_noise(run: Run) -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: Tensor) -> Tensor:
            x = x + 0.1 * torch.randn_like(x) + 0.1 * torch.rand(x.shape[0], 1, dtype=x.dtype)
            return self.inner(F.dropout(x, 0.2) * torch.bernoulli(torch.full_like(x, 0.8)))

    train(run, Noisy(), squared)


def attention(run: Run) -> None:
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(2, 2, 8, dropout=0.2, batch_first=True)
            self.head = nn.Linear(6, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.layer(x.view(len(x), 3, 2)).flatten(1))

    train(run, Attending().double(), squared)


def conjugated_values(run: Run) -> None:
    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp(outputs=2)

        def forward(self, x: Tensor) -> Tensor:
            return torch.view_as_complex(self.inner(x)).conj()

    train(run, Spectral(), lambda model, x, y, label: (model(x)[:, None] - y).abs().pow(2).mean())


def results_with_attributes(run: Run) -> None:
    class Result(dict):  # type: ignore[type-arg]
        def __init__(self, **items: Any) -> None:
            super().__init__(items)
            self.__dict__ = self

    class Scored(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: Tensor, y: Tensor) -> Result:
            return Result(loss=F.mse_loss(self.inner(x), y, reduction="sum"))

    train(run, Scored(), lambda model, x, y, label: model(x, y).loss)


def noise_in_the_cell(run: Run) -> None:
    train(run, mlp(), lambda model, x, y, label: squared(model, x + torch.randn_like(x), y, label))


def hidden_states(run: Run) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.GRU(2, 4), nn.Linear(4, 1)

        def forward(self, x: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
            out, hidden = self.cell(x, hidden)
            return self.head(out[-1]), hidden

    def loss_of(model: nn.Module, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
        hidden = torch.zeros(1, len(x), 4, dtype=x.dtype)
        out, hidden = model(x.view(len(x), 3, 2).transpose(0, 1), hidden)
        return F.mse_loss(out, y).sqrt() + hidden.norm()

    train(run, Recurrent().double(), loss_of)


def adversarial_inputs(run: Run) -> None:
    def loss_of(model: nn.Module, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(F.mse_loss(model(x), y), x)
        return F.mse_loss(model(x.detach() + 0.1 * slope.sign()), y) + 0.01 * sum(
            value.norm() for value in model.parameters()
        )

    train(run, mlp(), loss_of)


def forces_of_energies(run: Run) -> None:
    class Forces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.energy = mlp()

        def forward(self, x: Tensor) -> Tensor:
            x = x.detach().requires_grad_()
            return torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]

    def loss_of(model: nn.Module, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
        return (model(x) - y).norm()

    train(run, Forces(), loss_of)


def two_networks(run: Run) -> None:
    maker, critic = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6)).double(), mlp()
    run.models += [maker, critic]
    of_maker, of_critic = sgd(maker), sgd(critic)
    for _ in range(2):
        for x, _, _ in loader(shuffle=True):
            ones, zeros = torch.ones(len(x), 1).double(), torch.zeros(len(x), 1).double()
            made = maker(torch.randn(len(x), 4).double())
            of_critic.zero_grad()
            loss = F.binary_cross_entropy_with_logits(critic(torch.cat([x, made.detach()])), torch.cat([ones, zeros]))
            loss.backward()
            of_critic.step()
            of_maker.zero_grad()
            other = F.binary_cross_entropy_with_logits(critic(made), ones)
            other.backward()
            of_maker.step()
            run.print(loss)
            run.print(other)


def encoder_and_decoder(run: Run) -> None:
    encoder, decoder = mlp(outputs=4), nn.Linear(4, 6).double()
    run.models += [encoder, decoder]
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=0.01)
    for x, *_ in loader():
        code = encoder(x)
        loss = (decoder(code - code.mean(0)) - x).norm()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(encoder.parameters(), 0.1)
        optimizer.step()
        run.print(loss)


def optimizer_carried_by_the_model(run: Run) -> None:
    class Carrying(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()
            self.optimizer = torch.optim.Adam(self.parameters(), lr=0.01)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    train(run, Carrying(), squared)


def gradients_of_parameters(run: Run) -> None:
    model = mlp()
    run.models.append(model)
    optimizer = sgd(model)
    for x, y, _ in loader():
        parameters = list(model.parameters())
        slopes = torch.autograd.grad(F.mse_loss(model(x), y), parameters, create_graph=True)
        loss = F.mse_loss(model(x), y) + sum(slope.square().sum() for slope in slopes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.print(sum(slope.norm() for slope in slopes))


def second_moment_method(run: Run) -> None:
    model = mlp()
    run.models.append(model)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.3, max_iter=3, line_search_fn="strong_wolfe")
    for x, y, _ in loader():

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y).sqrt()
            loss.backward()
            return loss

        run.print(optimizer.step(closure))


def whole_data_set_without_loader(run: Run) -> None:
    model = mlp()
    run.models.append(model)
    optimizer = sgd(model)
    x, y, _ = next(iter(loader(batch_size=27)))
    for _ in range(4):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y).log()
        loss.backward()
        optimizer.step()
        run.print(loss)


def evaluation_after_each_epoch(run: Run) -> None:
    model = mlp(nn.BatchNorm1d(10), outputs=3)
    run.models.append(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    best, kept = 1e9, copy.deepcopy(model.state_dict())
    for _ in range(3):
        model.train()
        for x, _, label in loader(shuffle=True):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), label)
            loss.backward()
            optimizer.step()
        model.eval()
        right, total = 0, 0.0
        with torch.no_grad():
            for x, _, label in loader(num_samples=31):
                out = model(x)
                right += int((out.argmax(1) == label).sum())
                total += F.cross_entropy(out, label, reduction="sum").item()
        run.print(right)
        run.print(total)
        if total < best:
            best, kept = total, copy.deepcopy(model.state_dict())
    model.load_state_dict(kept)


def two_loaders(run: Run) -> None:
    model = mlp()
    run.models.append(model)
    optimizer = sgd(model)
    for (x, y, _), (other, _, _) in zip(loader(), loader(13, 4), strict=False):
        loss = F.mse_loss(model(x), y) + model(other).norm()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.print(loss)


def accumulated(run: Run) -> None:
    model = mlp()
    run.models.append(model)
    optimizer = sgd(model)
    for number, (x, y, _) in enumerate(loader()):
        loss = F.mse_loss(model(x), y).sqrt() / 2
        loss.backward()
        run.print(loss)
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()


@dataclasses.dataclass
class Output:
    value: Tensor
    parts: dict[str, Tensor]


def nested_outputs(run: Run) -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.one, self.two = mlp(outputs=5), nn.Linear(5, 1).double(), nn.Linear(5, 3).double()

        def forward(self, batch: dict[str, Tensor]) -> Output:
            code = self.body(batch["x"])
            return Output(self.one(code), {"class": self.two(code), "scale": self.one.weight.norm()})

    def loss_of(model: nn.Module, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
        found = model({"x": x, "unused": torch.ones(2)})
        both = (found.value - y).norm() + F.cross_entropy(found.parts["class"], label, label_smoothing=0.1)
        return both + found.parts["scale"]

    train(run, Heads(), loss_of)


def squeezed(run: Run) -> None:
    class Squeezed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x).squeeze()

    train(run, Squeezed(), lambda model, x, y, label: F.mse_loss(model(x), y.squeeze()).sqrt())


def shared_encoder(*, is_reversed: bool, is_summed: bool) -> Callable[[Run], None]:
    """Return a program of two models with one encoder, by one backward pass or one for each model."""

    def program(run: Run) -> None:
        encoder = mlp(outputs=6)
        run.models += [nn.Sequential(encoder, nn.Tanh(), nn.Linear(6, 1)).double() for _ in range(2)]
        values = dict.fromkeys(value for model in run.models for value in model.parameters())
        optimizer = torch.optim.SGD(list(values), lr=0.1)
        for x, y, _ in loader(shuffle=True):
            losses = [F.mse_loss(model(x), y).sqrt() for model in run.models]
            optimizer.zero_grad()
            if is_summed:
                sum(losses, torch.zeros(())).backward()
            for loss in losses[:: -1 if is_reversed else 1]:
                run.print(loss)
                if not is_summed:
                    loss.backward()
            optimizer.step()

    program.__name__ = f"shared_encoder_{'summed' if is_summed else 'reversed' if is_reversed else 'in_turn'}"
    return program


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = mlp(outputs=6), nn.ModuleList([nn.Linear(6, 1), nn.Linear(6, 1)])
        self.double()

    def forward(self, x: Tensor) -> list[Tensor]:
        hidden = torch.tanh(self.body(x))
        return [head(hidden) for head in self.heads]


def head_by_head(run: Run) -> None:
    """Train two heads by a backward pass each; the body is trained in the first epoch only."""
    model = TwoHeads()
    run.models.append(model)
    optimizer = sgd(model)
    for epoch in range(2):
        model.body.requires_grad_(epoch == 0)
        for x, y, _ in loader(shuffle=True):
            first, second = model(x)
            optimizer.zero_grad()
            F.mse_loss(first, y).sqrt().backward(retain_graph=True)
            F.l1_loss(second, -y).backward()
            optimizer.step()


def head_left_out_later(run: Run) -> None:
    model = TwoHeads()
    run.models.append(model)
    optimizer = sgd(model)
    for epoch in range(2):
        for x, y, _ in loader(shuffle=True):
            first, second = model(x)
            optimizer.zero_grad()
            loss = F.mse_loss(first, y).sqrt()
            (loss + F.l1_loss(second, -y) if epoch == 0 else loss).backward()
            optimizer.step()


def other_head_by_another_pass(run: Run) -> None:
    model = TwoHeads()
    run.models.append(model)
    optimizer = sgd(model)
    for x, y, _ in loader(shuffle=True):
        optimizer.zero_grad()
        F.mse_loss(model(x)[0], y).sqrt().backward()
        F.l1_loss(model(2 * x)[1], -y).backward()
        optimizer.step()


def part_and_whole(run: Run) -> None:
    """Call a part directly, which every rank computes whole, and then the model: both normalize by their batch."""
    model = nn.Sequential(mlp(nn.BatchNorm1d(10), outputs=6), nn.Linear(6, 1)).double()

    def loss_of(model: Any, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
        code = model[0](x)
        return squared(model, x, y, label) + code.mean(0).norm()

    train(run, model, loss_of)


class ShuffledBatches:
    """A batch sampler that draws in its ``__iter__``, when the loop begins, and not for its first batch."""

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Any:
        return iter([rows.tolist() for rows in torch.randperm(27).split(8)])


def own_sampler(run: Run, **options: Any) -> None:
    data = DataLoader(loader().dataset, batch_sampler=ShuffledBatches(), **options)  # type: ignore[arg-type]
    model = mlp(nn.Dropout(0.2))
    run.models.append(model)
    optimizer = sgd(model)
    for _ in range(2):
        for (x, y, _), (other, _, _) in zip(data, loader(shuffle=True), strict=True):
            loss = F.mse_loss(model(x), y + other.mean()).sqrt() + 0.1 * torch.rand(())
            run.print(loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def own_sampler_and_a_loader_process(run: Run) -> None:
    own_sampler(run, num_workers=1)


def branch_without_effect(run: Run) -> None:
    """Take a shorter way if no row has a large value, as code with masks does; rows of some ranks have one first."""

    class Clipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: Tensor) -> Tensor:
            run.row_counts.write(f"{len(x)} ")
            if (x[:, 0] > 1).any():
                x = torch.where(x > 1, 1, x)
            return self.inner(x.clamp(max=1))

    train(run, Clipping(), squared, loader())


def temperature_with_its_own_optimizer(run: Run) -> None:
    model = mlp()
    run.models.append(model)
    optimizer = sgd(model)
    log_alpha = torch.zeros((), dtype=torch.float64, requires_grad=True)
    alpha_optimizer = torch.optim.Adam([log_alpha], lr=0.1)
    x, y, _ = (torch.stack(column) for column in zip(*loader().dataset, strict=True))
    for _ in range(3):
        rows = torch.randint(len(x), (8,))
        out = model(x[rows])
        loss = F.mse_loss(out, y[rows]) + log_alpha.exp().detach() * out.abs().mean()
        alpha_loss = log_alpha * (0.3 - out.detach().mean())
        for step, value in ((optimizer, loss), (alpha_optimizer, alpha_loss)):
            step.zero_grad()
            value.backward()
            step.step()
        run.print(log_alpha)


class Endless(DataLoader[Any]):
    """Is an iterator itself, which was started when the loader was made."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.batches = super().__iter__()
        self.num_epochs = 0

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.batches)
        except StopIteration:
            self.batches = super().__iter__()
            self.num_epochs += 1
            return next(self.batches)


class Repeated(DataLoader[Any]):
    """Begins again at the end."""

    def __iter__(self) -> Any:
        while True:
            yield from super().__iter__()


def loaders_without_end(run: Run) -> None:
    model = mlp()
    run.models.append(model)
    optimizer = sgd(model)
    data = loader().dataset
    endless, repeated = Endless(data, batch_size=8, shuffle=True), Repeated(data, batch_size=8, shuffle=True)
    for batches in (endless, repeated, endless):
        for _, (x, y, _) in zip(range(6), batches, strict=False):
            loss = F.mse_loss(model(x + 0.1 * torch.randn_like(x)), y)
            run.print(loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    run.print(endless.num_epochs)
    x, y, _ = next(endless)
    run.print(F.mse_loss(model(x), y))


def gradients_assigned_by_data(run: Run) -> None:
    model = mlp()
    run.models.append(model)
    optimizer = sgd(model)
    for x, y, _ in loader(shuffle=True):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        for value in model.parameters():
            assert value.grad is not None
            value.grad.data = 0.5 * value.grad.data
            value.grad[:1].data = torch.zeros(
                1
            ).double()  # other memory for the view, which leaves the gradient as it is
            run.print(value.grad.norm())
        optimizer.step()


DIVIDED = [
    conjugated_values, results_with_attributes,
    optimizer_carried_by_the_model,
    gradients_assigned_by_data, temperature_with_its_own_optimizer, loaders_without_end,
    batch_norm, batch_norm_of_images, batch_norm_of_centred_values, penalty_through_batch_norm,
    dropout, functional_noise, attention,
    random_slopes_in_evaluation,
    noise_in_the_cell, hidden_states, adversarial_inputs, two_networks, encoder_and_decoder,
    gradients_of_parameters, second_moment_method, whole_data_set_without_loader, evaluation_after_each_epoch,
    two_loaders, accumulated, nested_outputs, squeezed, branch_without_effect, own_sampler, part_and_whole,
    own_sampler_and_a_loader_process, head_by_head, head_left_out_later,
    other_head_by_another_pass,
    shared_encoder(is_reversed=False, is_summed=True), shared_encoder(is_reversed=False, is_summed=False),
    shared_encoder(is_reversed=True, is_summed=False),
]  # fmt: skip


PROGRAMS = {program.__name__: program for program in (*DIVIDED, *UNDIVIDED, *CHANGED, *OF_ARGUMENTS)}


def of_one_device(name: str) -> Run:
    run = Run()
    torch.manual_seed(7)
    PROGRAMS[name](run)
    return run


@dataclasses.dataclass
class Result:
    weights: Values
    printed: Values
    row_counts: list[int]
    warned: list[str]


def _own(caught: list[warnings.WarningMessage]) -> list[str]:
    """Return the warnings of a difference: not of torch's reducer, unused parameters or Python."""
    other = ("bucket view strides", "took no part in the loss")
    found = [str(item.message) for item in caught if not issubclass(item.category, DeprecationWarning)]
    return [message for message in found if not any(text in message for text in other)]


def run_programs(world: World, options: dict[str, Any]) -> dict[str, Result]:
    found = {}
    for name, program in PROGRAMS.items():
        accelerator = Accelerator(world=world, cpu=True, config={"divide": "model", **options})
        cells, run = PlainCells(accelerator), Run()
        torch.manual_seed(7)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with cells.run_cell():
                program(run)
        found[name] = Result(
            run.weights, run.printed, [int(count) for count in run.row_counts.getvalue().split()], _own(caught)
        )
        accelerator.close()
    return found


@pytest.fixture(scope="module", params=[nightly(2), 3])
def on_ranks(request: Any) -> dict[str, Result]:
    first, *others = run_ranks(run_programs, request.param, {}, timeout_s=200)
    for other in others:
        assert {name: item.weights for name, item in other.items()} == {
            name: item.weights for name, item in first.items()
        }
    return first


@pytest.mark.parametrize("name", PROGRAMS)
def test_weights_and_printed_values_are_those_of_one_device(name: str, on_ranks: Any) -> None:
    expected = of_one_device(name)
    assert on_ranks[name].printed == pytest.approx(expected.printed, rel=1e-9, abs=1e-12)
    assert on_ranks[name].weights == pytest.approx(expected.weights, rel=1e-9, abs=1e-9)
    assert not on_ranks[name].warned


def test_a_branch_without_effect_keeps_calls_divided(on_ranks: Any) -> None:
    counts = on_ranks["branch_without_effect"].row_counts
    assert 8 in counts, "the whole batch is computed where ranks took different branches"
    assert counts[-1] < 8


def test_means_that_are_rounding_keep_calls_divided(on_ranks: Any) -> None:
    assert on_ranks["batch_norm_of_centred_values"].row_counts[-1] < 8


def run_late_mixing(world: World, options: dict[str, Any]) -> tuple[Values, list[str]]:
    """Train a model that combines its samples after some calls, which nothing that is observed shows."""
    accelerator = Accelerator(world=world, cpu=True, config={"divide": "model"})
    cells, run = PlainCells(accelerator), Run()
    torch.manual_seed(7)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with cells.run_cell():
            late_mixing(run)
    accelerator.close()
    return run.weights, _own(caught)


def late_mixing(run: Run) -> None:
    history = [0.0] * 100  # too long to be followed

    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x - x.mean(0) if len(history) > 102 else x)

    def loss_of(model: nn.Module, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
        loss = squared(model, x, y, label)
        history.append(loss.item())
        return loss

    train(run, Late(), loss_of, loader(num_samples=64))


def test_a_model_that_mixes_samples_later_is_found_and_reported() -> None:
    (weights, warned), (other_weights, _) = run_ranks(run_late_mixing, 2, {}, timeout_s=100)
    assert weights == other_weights
    (message,) = warned
    assert "earlier calls of Late (3) were divided among the workers, but it computes with several samples" in message
