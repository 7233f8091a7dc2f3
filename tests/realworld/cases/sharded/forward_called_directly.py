# `model.forward` is called as a method, as reinforcement learning code does, after an evaluation that left weights gathered.
# outcome: equal
# compare: model, losses
# %%
import torch
from torch import nn


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))


x, y = torch.randn(12, 3), torch.randn(12, 1)
model = Policy()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
losses = []

# %% accelerate --strategy fsdp
for _ in range(4):
    with torch.no_grad():
        model(x)
    loss = nn.functional.mse_loss(model.forward(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
