"""Stop on all processes as soon as one of them wants to."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch_size", type=int, default=8)
    args = parser.parse_args()

    accelerator = Accelerator()
    set_seed(0)
    dataset = TensorDataset(torch.randn(160, 4), torch.randn(160, 1))
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(dataset, batch_size=args.batch_size))

    steps = 0
    for inputs, targets in loader:
        accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        if steps == 3 and accelerator.is_last_process:
            accelerator.set_trigger()
        if accelerator.check_trigger():
            break

    everyone = accelerator.gather(torch.tensor([steps]))
    accelerator.print(f"stopped={sorted(set(everyone.tolist()))}")
    accelerator.print(f"bias={float(model.bias):.6f}")


if __name__ == "__main__":
    main()
