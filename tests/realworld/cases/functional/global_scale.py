# Global scale.
# outcome: equal
# compare: model, loss
# %%

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim

X = torch.randn(128, 4)
Y = 3 * X.sum(1, keepdim=True)
scale = torch.tensor(1.0, requires_grad=True)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Linear(4, 1)

    def forward(self, x):
        return self.f(x) * scale


model = Net()
optimizer = optim.SGD([*model.parameters(), scale], lr=0.05)

# %% accelerate
for epoch in range(3):
    perm = torch.randperm(128)
    for i in range(0, 128, 32):
        idx = perm[i : i + 32]
        loss = F.mse_loss(model(X[idx]), Y[idx])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(epoch, round(loss.item(), 5), round(scale.item(), 5))
