"""Try smaller batches until one fits into memory."""

import torch
from accelerate import Accelerator
from accelerate.utils import find_executable_batch_size, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    accelerator = Accelerator()
    tried = []

    @find_executable_batch_size(starting_batch_size=64)
    def train(batch_size: int) -> float:
        accelerator.free_memory()
        tried.append(batch_size)
        set_seed(0)
        dataset = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(dataset, batch_size=batch_size))
        for inputs, targets in loader:
            if batch_size > 20:
                raise RuntimeError("CUDA out of memory. Tried to allocate a lot")
            accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
        return float(accelerator.gather(model.weight.detach().sum()).mean())

    result = train()
    accelerator.print(f"fits={tried[-1] <= 20} more than one try={len(tried) > 1} finite={result == result}")


if __name__ == "__main__":
    main()
