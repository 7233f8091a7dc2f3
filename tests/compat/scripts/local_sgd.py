"""Step on each process by itself, and average the weights now and then."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--local_sgd_steps", type=int, default=1)
    args = parser.parse_args()

    accelerator = Accelerator()
    set_seed(0)
    dataset = TensorDataset(torch.randn(128, 4), torch.randn(128, 1))
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(dataset, batch_size=args.batch_size))

    with LocalSGD(
        accelerator=accelerator, model=model, local_sgd_steps=args.local_sgd_steps, enabled=True
    ) as local_sgd:
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()
                local_sgd.step()

    biases = accelerator.gather(accelerator.unwrap_model(model).bias.detach())
    accelerator.print(f"equal={bool((biases == biases[0]).all())} bias={float(biases[0]):.6f}")


if __name__ == "__main__":
    main()
