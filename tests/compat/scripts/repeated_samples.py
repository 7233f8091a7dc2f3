"""Train on samples that do not divide among processes, in an order that depends on a seed only."""

import argparse

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch_size", type=int, default=4)
    args = parser.parse_args()

    set_seed(3)
    reading = DataLoaderConfiguration(even_batches=True, use_seedable_sampler=True)
    accelerator = Accelerator(cpu=True, dataloader_config=reading)
    loader = DataLoader(TensorDataset(torch.arange(21.0)[:, None]), batch_size=args.batch_size, shuffle=True)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(2):
        loader.set_epoch(epoch)
        for (inputs,) in loader:
            accelerator.backward((model(inputs) ** 2).mean())
            optimizer.step()
            optimizer.zero_grad()
            accelerator.print(accelerator.gather(inputs).flatten().int().tolist())
    accelerator.print([f"{value.item():.6f}" for value in model.parameters()])


if __name__ == "__main__":
    main()
