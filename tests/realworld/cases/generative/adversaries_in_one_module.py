# Generator and discriminator are parts of one module, whose methods call them; each has its optimizer.
# outcome: equal
# compare: model, losses

# %%
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)


class Adversaries(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6))
        self.critic = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def make(self, noise):
        return self.generator(noise)

    def rate(self, rows):
        return self.critic(rows)


model = Adversaries()
loader = DataLoader(TensorDataset(torch.randn(32, 6)), batch_size=8, shuffle=True)
of_generator = torch.optim.Adam(model.generator.parameters(), lr=0.01)
of_critic = torch.optim.Adam(model.critic.parameters(), lr=0.01)

# %% accelerate
losses = []
for epoch in range(2):
    for (real,) in loader:
        made = model.make(torch.randn(len(real), 4))
        critic_loss = model.rate(made.detach()).mean() - model.rate(real).mean()
        of_critic.zero_grad()
        critic_loss.backward()
        of_critic.step()
        generator_loss = -model.rate(made).mean()
        of_generator.zero_grad()
        generator_loss.backward()
        of_generator.step()
        losses.append((critic_loss.item(), generator_loss.item()))
