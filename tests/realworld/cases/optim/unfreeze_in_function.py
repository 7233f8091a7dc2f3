# Unfreeze in function.
# outcome: equal
# compare: model, loss
# %%

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim

X = torch.randn(128, 4)
Y = X.sum(1, keepdim=True)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.backbone(x))


model = Net()
for p in model.backbone.parameters():
    p.requires_grad = False
optimizer = optim.SGD(model.parameters(), lr=0.05)


def train(model, epochs):
    for epoch in range(epochs):
        if epoch == 2:
            for p in model.backbone.parameters():
                p.requires_grad = True
        perm = torch.randperm(128)
        for i in range(0, 128, 32):
            idx = perm[i : i + 32]
            loss = F.mse_loss(model(X[idx]), Y[idx])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(epoch, round(loss.item(), 5))


# %% accelerate
train(model, 4)
