"""Accumulate gradients without a block for each batch: read ahead, step by step, and with steps after blocks."""

import argparse
import contextlib

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch_size", type=int, default=32)
    args = parser.parse_args()
    accelerator = Accelerator(gradient_accumulation_steps=2)
    set_seed(0)
    digits = load_digits()
    dataset = TensorDataset(
        torch.tensor(digits.data[: 8 * 32], dtype=torch.float32) / 16, torch.tensor(digits.target[: 8 * 32])
    )
    loader = DataLoader(dataset, batch_size=args.batch_size)
    model = nn.Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4 * accelerator.num_processes, 0.5)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)

    def backward(inputs: torch.Tensor, targets: torch.Tensor) -> None:
        accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))

    def step(kind: str) -> None:
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        total = sum(
            parameter.detach().double().abs().sum() for parameter in accelerator.unwrap_model(model).parameters()
        )
        accelerator.print(f"{kind} weights={float(total):.5f} rate={schedule.get_last_lr()[0]:.5f}")

    batches = iter(loader)
    for _ in range(4):
        first, second = next(batches), next(batches)
        with model.no_sync() if accelerator.num_processes > 1 else contextlib.nullcontext():
            backward(*first)
        backward(*second)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        step("read ahead")
    for batch in loader:
        backward(*batch)
        step("without blocks")
    for batch in loader:
        with accelerator.accumulate(model):
            backward(*batch)
        step("after blocks")


if __name__ == "__main__":
    main()
