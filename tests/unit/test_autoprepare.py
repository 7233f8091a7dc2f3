"""Plain cells in one process: what is found, and what plain calls mean while a cell runs."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accel_nb.accelerator import Accelerator
from accel_nb.accelerator.plain_cells.autoprepare import PlainCells
from accel_nb.errors import MisuseError


def test_roots_only_each_once_and_what_schedulers_and_lists_hold() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    other = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loader = DataLoader([1, 2, 3])
    namespace = {
        "head": model[1],
        "net": model,
        "same": model,
        "more": [other],
        "plan": scheduler,
        "data": loader,
        "n": 1,
    }
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    found = PlainCells(accelerator).prepare(namespace, [*namespace, "missing"])
    assert found.modules == (model, other)
    assert found.optimizers == (optimizer,)
    assert found.schedulers == (scheduler,)
    assert found.loaders == (loader,)
    assert PlainCells(accelerator).prepare(namespace, namespace).objects == ()
    accelerator.close()
    assert len(PlainCells(Accelerator(cpu=True)).prepare(namespace, namespace).objects) == 5


def test_cuda_means_the_workers_device_and_torch_is_put_back() -> None:
    before = {name: vars(torch.Tensor).get(name) for name in ("to", "cuda", "backward")}
    factories = (torch.zeros, torch.nn.utils.clip_grad_norm_, nn.Module.to)
    accelerator = Accelerator(cpu=True)
    with PlainCells(accelerator).run_cell():
        x = torch.zeros(2, device="cuda")
        tensors = [x, x.cuda(), x.to("cuda:0"), x.to(device="cuda"), x.to(torch.device("cuda", 3)), x.cuda(1)]
        tensors += [torch.normal(0.0, 1.0, (2,), device="cuda"), torch.hann_window(4, device="cuda:0")]
        tensors += [torch.asarray([1.0], device="cuda"), torch.empty_strided((2,), (1,), device="cuda:1")]
        tensors += [torch.eye(2).to_sparse(), torch.sparse_coo_tensor([[0]], [1.0], (2,), device="cuda")]
        tensors += [x.new_zeros(2, device="cuda"), x.new_tensor([1.0], device="cuda:0"), x.new_full((1,), 2.0)]
        assert {tensor.device.type for tensor in tensors} == {"cpu"}
        assert x.to(torch.float64).dtype == torch.float64
        assert x.to(x.double()).dtype == torch.float64
        model = nn.Linear(2, 1, device="cuda").to("cuda").cuda()
        assert model.weight.device.type == "cpu"
    assert {name: vars(torch.Tensor).get(name) for name in before} == before
    assert (torch.zeros, torch.nn.utils.clip_grad_norm_, nn.Module.to) == factories


def _fails_inside(accelerator: Accelerator) -> None:
    with PlainCells(accelerator).run_cell():
        raise KeyError


def test_torch_is_put_back_after_an_error() -> None:
    plain = torch.Tensor.backward
    with pytest.raises(KeyError):
        _fails_inside(Accelerator(cpu=True))
    assert torch.Tensor.backward is plain


def test_gradients_outside_of_the_cell_are_plain() -> None:
    accelerator = Accelerator(cpu=True)
    x = torch.ones(3, requires_grad=True)
    with PlainCells(accelerator).run_cell():
        (x * 2).sum().backward()
        (x * 2).backward(torch.ones(3))
        with pytest.raises(RuntimeError, match="scalar"):
            (x * 2).backward()
    assert x.grad is not None
    assert x.grad.tolist() == [4.0, 4.0, 4.0]


@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_clipping_by_the_cell_sees_true_gradients_of_whole_windows(precision: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = model.weight.detach().clone()
    accelerator = Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)  # type: ignore[arg-type]
    cells = PlainCells(accelerator)
    cells.prepare({"model": model, "optimizer": optimizer}, ["model", "optimizer"])
    norms = []
    with cells.run_cell():
        for _ in range(2):
            model(torch.ones(1, 4)).mean().backward()
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
    assert norms[1] == pytest.approx(5**0.5, rel=1e-3)
    step = (before - model.weight.detach()).flatten()
    assert step.norm() == pytest.approx(0.5 * (4 / 5) ** 0.5, rel=1e-3)


def test_two_optimizers_with_backward_passes_of_their_own_cannot_accumulate_without_a_block() -> None:
    first, second = nn.Linear(1, 1), nn.Linear(1, 1)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (first, second)]
    loader = DataLoader(torch.ones(8, 1), batch_size=2)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    namespace = {"first": first, "second": second, "a": optimizers[0], "b": optimizers[1], "loader": loader}
    cells = PlainCells(accelerator)
    cells.prepare(namespace, namespace)

    def train() -> None:
        for x in loader:
            for model, optimizer in zip((first, second), optimizers, strict=True):
                model(x).sum().backward()
                optimizer.step()

    with cells.run_cell(), pytest.raises(MisuseError, match="wrap what is done with a batch"):
        train()
    accelerator.close()
