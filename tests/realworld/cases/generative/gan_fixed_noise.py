# A GAN whose noise comes with the data, so that nothing is drawn in the loop; both losses added up for the discriminator.
# outcome: equal
# compare: generator, discriminator
# runs: always
# %%
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

real, noise = torch.randn(36, 2) + 1, torch.randn(36, 4)
loader = DataLoader(TensorDataset(real, noise), batch_size=8, shuffle=True)
generator = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 2))
discriminator = nn.Sequential(nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, 1))
opt_g = torch.optim.SGD(generator.parameters(), lr=0.1)
opt_d = torch.optim.SGD(discriminator.parameters(), lr=0.1)

# %% accelerate
for epoch in range(3):
    for x, z in loader:
        fake = generator(z)
        real_score, fake_score = discriminator(x), discriminator(fake.detach())
        d_loss = (
            F.binary_cross_entropy_with_logits(real_score, torch.ones_like(real_score))
            + F.binary_cross_entropy_with_logits(fake_score, torch.zeros_like(fake_score))
        ) / 2
        opt_d.zero_grad()
        d_loss.backward()
        opt_d.step()
        score = discriminator(fake)
        g_loss = F.binary_cross_entropy_with_logits(score, torch.ones_like(score))
        opt_g.zero_grad()
        g_loss.backward()
        opt_g.step()
