# Everything in a function, the whole data in each step, no loader.
# outcome: equal
# compare: net, losses
# %%
import torch
from torch import nn, optim

X = torch.linspace(-1, 1, 50).unsqueeze(1)
Y = X ** 3 + 0.1 * torch.randn(50, 1)


def fit(epochs=20):
    net = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
    opt = optim.SGD(net.parameters(), lr=0.1)
    mse = nn.MSELoss()
    losses = []
    for _ in range(epochs):
        loss = mse(net(X), Y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return net, losses

# %% accelerate
net, losses = fit()
