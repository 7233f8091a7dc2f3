# The GAN of the tutorials: real and fake batches, two optimizers, the generator through the discriminator, SGD.
# outcome: equal
# compare: netG, netD
# %%
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

real_data = torch.randn(40, 2) * 0.5 + 2
dataloader = DataLoader(TensorDataset(real_data), batch_size=8, shuffle=True)
nz = 3
netG = nn.Sequential(nn.Linear(nz, 16), nn.LeakyReLU(0.2), nn.Linear(16, 2))
netD = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1), nn.Sigmoid())
criterion = nn.BCELoss()
optimizerD = torch.optim.SGD(netD.parameters(), lr=0.05)
optimizerG = torch.optim.SGD(netG.parameters(), lr=0.05)

# %% accelerate
real_label, fake_label = 1.0, 0.0
for epoch in range(2):
    for i, (data,) in enumerate(dataloader, 0):
        netD.zero_grad()
        b_size = data.size(0)
        label = torch.full((b_size,), real_label)
        errD_real = criterion(netD(data).view(-1), label)
        errD_real.backward()
        noise = torch.randn(b_size, nz)
        fake = netG(noise)
        label.fill_(fake_label)
        errD_fake = criterion(netD(fake.detach()).view(-1), label)
        errD_fake.backward()
        optimizerD.step()
        netG.zero_grad()
        label.fill_(real_label)
        errG = criterion(netD(fake).view(-1), label)
        errG.backward()
        optimizerG.step()
