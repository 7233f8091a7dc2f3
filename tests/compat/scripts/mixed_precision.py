"""Train in bfloat16; compute one loss in full precision."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import AutocastKwargs, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch_size", type=int, default=16)
    args = parser.parse_args()

    accelerator = Accelerator(mixed_precision="bf16", kwargs_handlers=[AutocastKwargs(cache_enabled=True)])
    set_seed(5)
    inputs = torch.randn(128, 8)
    loader = DataLoader(TensorDataset(inputs, inputs[:, :2].sum(1).long() % 3), batch_size=args.batch_size)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    for _ in range(3):
        for features, targets in loader:
            logits = model(features)
            with accelerator.autocast(autocast_handler=AutocastKwargs(enabled=False)):
                loss = nn.functional.cross_entropy(logits, targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

    exact = accelerator.unwrap_model(model, keep_fp32_wrapper=False)(inputs)
    accelerator.print(f"precision={accelerator.mixed_precision} logits={logits.dtype} plain={exact.dtype}")
    accelerator.print(f"loss={float(nn.functional.cross_entropy(exact, inputs[:, :2].sum(1).long() % 3)):.3f}")


if __name__ == "__main__":
    main()
