# A mixture density network with torch.distributions, negative log likelihood.
# outcome: equal
# compare: model
# %%
import torch
import torch.nn as nn
from torch.distributions import Categorical, MixtureSameFamily, Normal
from torch.utils.data import DataLoader, TensorDataset


class MDN(nn.Module):
    def __init__(self, k=3):
        super().__init__()
        self.hidden = nn.Sequential(nn.Linear(1, 12), nn.Tanh())
        self.pi, self.mu, self.sigma = nn.Linear(12, k), nn.Linear(12, k), nn.Linear(12, k)

    def forward(self, x):
        h = self.hidden(x)
        return self.pi(h), self.mu(h), torch.exp(self.sigma(h))


y = torch.rand(45, 1) * 4 - 2
x = y + 0.6 * torch.sin(4 * y)
loader = DataLoader(TensorDataset(x, y), batch_size=10)
model = MDN()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

# %% accelerate
for epoch in range(2):
    for xb, yb in loader:
        pi, mu, sigma = model(xb)
        mixture = MixtureSameFamily(Categorical(logits=pi), Normal(mu, sigma))
        loss = -mixture.log_prob(yb.squeeze(1)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
