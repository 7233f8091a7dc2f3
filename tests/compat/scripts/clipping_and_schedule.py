"""Clip gradients and follow a schedule with a warm-up."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch_size", type=int, default=16)
    args = parser.parse_args()

    accelerator = Accelerator(gradient_accumulation_steps=2)
    set_seed(3)
    inputs = torch.randn(256, 8)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True) * 20), batch_size=args.batch_size)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    num_processes = accelerator.num_processes  # a prepared schedule advances by so many at each step
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step // num_processes + 1) / 6))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    largest = 0.0
    for features, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(features), targets))
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                largest = max(largest, float(norm))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    total = sum(parameter.detach().double().abs().sum() for parameter in model.parameters())
    accelerator.print(f"norm={largest:.4f} lr={scheduler.get_last_lr()[0]:.6f} weights={float(total):.4f}")


if __name__ == "__main__":
    main()
