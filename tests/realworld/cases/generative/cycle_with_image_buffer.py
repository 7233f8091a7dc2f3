# CycleGAN in small: two generators, two critics, itertools.chain in one optimizer, identity and cycle losses, a buffer that draws.
# outcome: equal
# compare: G_AB, G_BA, D_A, D_B
# %%
import itertools
import random
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

a, b = torch.randn(24, 3), torch.randn(24, 3) + 1
loader = DataLoader(TensorDataset(a, b), batch_size=4)
make = lambda out: nn.Sequential(nn.Linear(3, 8), nn.LeakyReLU(0.2), nn.Linear(8, out))
G_AB, G_BA, D_A, D_B = make(3), make(3), make(1), make(1)
optimizer_G = torch.optim.SGD(itertools.chain(G_AB.parameters(), G_BA.parameters()), lr=0.05)
optimizer_D = torch.optim.SGD(itertools.chain(D_A.parameters(), D_B.parameters()), lr=0.05)
mse, l1 = nn.MSELoss(), nn.L1Loss()


class ReplayBuffer:
    def __init__(self, max_size=6):
        self.max_size, self.data = max_size, []

    def push_and_pop(self, batch):
        result = []
        for element in batch.detach():
            element = element.unsqueeze(0)
            if len(self.data) < self.max_size:
                self.data.append(element)
                result.append(element)
            elif random.uniform(0, 1) > 0.5:
                i = random.randint(0, self.max_size - 1)
                result.append(self.data[i].clone())
                self.data[i] = element
            else:
                result.append(element)
        return torch.cat(result)


buffer_A, buffer_B = ReplayBuffer(), ReplayBuffer()

# %% accelerate
for epoch in range(2):
    for real_A, real_B in loader:
        valid, fake = torch.ones(len(real_A), 1), torch.zeros(len(real_A), 1)
        optimizer_G.zero_grad()
        fake_B, fake_A = G_AB(real_A), G_BA(real_B)
        loss_id = l1(G_BA(real_A), real_A) + l1(G_AB(real_B), real_B)
        loss_gan = mse(D_B(fake_B), valid) + mse(D_A(fake_A), valid)
        loss_cycle = l1(G_BA(fake_B), real_A) + l1(G_AB(fake_A), real_B)
        (loss_gan + 10 * loss_cycle + 5 * loss_id).backward()
        optimizer_G.step()
        optimizer_D.zero_grad()
        loss_A = (mse(D_A(real_A), valid) + mse(D_A(buffer_A.push_and_pop(fake_A)), fake)) / 2
        loss_B = (mse(D_B(real_B), valid) + mse(D_B(buffer_B.push_and_pop(fake_B)), fake)) / 2
        (loss_A + loss_B).backward()
        optimizer_D.step()
