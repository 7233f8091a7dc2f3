# A generator's inputs come from a sparse embedding; the discriminator steps between its forward and backward pass.
# outcome: equal
# compare: generator, discriminator, codes, losses
# %%
import torch
from torch import nn

torch.manual_seed(1)
generator = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 6))
discriminator = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
codes = nn.Embedding(50, 8, sparse=True)
of_generator = torch.optim.Adam(generator.parameters(), 1e-3)
of_discriminator = torch.optim.SGD(discriminator.parameters(), 1e-2)
of_codes = torch.optim.SparseAdam(codes.parameters(), 1e-2)
losses = []
# %% accelerate
for step in range(4):
    fake, real = generator(codes(torch.randint(0, 50, (13 + step,)))), torch.randn(13 + step, 6)
    apart = torch.relu(1 - discriminator(real)).mean() + torch.relu(1 + discriminator(fake.detach())).mean()
    of_discriminator.zero_grad()
    apart.backward()
    of_discriminator.step()
    alike = fake.std() - discriminator(fake).mean()
    of_generator.zero_grad()
    of_codes.zero_grad()
    alike.backward()
    of_generator.step()
    of_codes.step()
    losses.append((apart.item(), alike.item()))
