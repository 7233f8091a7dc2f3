"""Train two models against each other, each with its own optimizer."""

import argparse

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch_size", type=int, default=16)
    args = parser.parse_args()

    accelerator = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)])
    set_seed(0)
    real, noise = torch.randn(128, 2) + 3, torch.randn(128, 4)
    loader = DataLoader(TensorDataset(real, noise), batch_size=args.batch_size)
    generator = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    critic = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=0.01)
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=0.01)
    generator, critic, generator_optimizer, critic_optimizer, loader = accelerator.prepare(
        generator, critic, generator_optimizer, critic_optimizer, loader
    )

    loss_of = nn.functional.binary_cross_entropy_with_logits
    for _ in range(2):
        for samples, seeds in loader:
            fakes = generator(seeds)
            critic_optimizer.zero_grad()
            scores = critic(torch.cat([samples, fakes.detach()]))
            labels = torch.cat([torch.ones(len(samples), 1), torch.zeros(len(fakes), 1)])
            accelerator.backward(loss_of(scores, labels))
            critic_optimizer.step()

            generator_optimizer.zero_grad()
            scores = critic(generator(seeds))
            accelerator.backward(loss_of(scores, torch.ones_like(scores)))
            generator_optimizer.step()

    for name, model in (("generator", generator), ("critic", critic)):
        total = sum(parameter.detach().double().abs().sum() for parameter in model.parameters())
        accelerator.print(f"{name}={float(total):.4f}")


if __name__ == "__main__":
    main()
