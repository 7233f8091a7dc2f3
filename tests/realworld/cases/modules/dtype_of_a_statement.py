# A statement of the cell changes the dtype of a model, before and after it has trained; no loader is used.
# outcome: equal
# compare: net, losses
# %%
import torch
import torch.nn as nn

x = torch.randn(12, 3)
net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
losses = []


def steps(inputs):
    for _ in range(3):
        optimizer.zero_grad()
        loss = (net(inputs) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.double().item())


# %% accelerate
net = net.float()
steps(x.float())
net.double()
steps(x.double())
