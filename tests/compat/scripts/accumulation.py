"""Accumulate gradients over several batches, the short window at the end of the loader included."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin, set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--num_samples", type=int, default=26 * 32)  # the last window has two of its four batches
    args = parser.parse_args()

    plugin = GradientAccumulationPlugin(num_steps=4, sync_with_dataloader=True)
    accelerator = Accelerator(gradient_accumulation_plugin=plugin)
    set_seed(0)
    digits = load_digits()
    size = args.num_samples
    dataset = TensorDataset(
        torch.tensor(digits.data[:size], dtype=torch.float32) / 16, torch.tensor(digits.target[:size])
    )
    loader = DataLoader(dataset, batch_size=args.batch_size)
    model = nn.Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    num_steps = 0
    for _ in range(2):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            num_steps += accelerator.sync_gradients

    accelerator.print(f"steps={num_steps} accumulation={accelerator.gradient_accumulation_steps}")
    accelerator.print(f"bias={[round(value, 5) for value in accelerator.unwrap_model(model).bias.tolist()]}")


if __name__ == "__main__":
    main()
