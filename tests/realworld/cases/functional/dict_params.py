# Dict params.
# outcome: equal
# compare: model, losses
# %%

import torch
import torch.nn as nn
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset

X = torch.randn(128, 4)
Y = 3 * X.sum(1, keepdim=True)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Linear(4, 8)
        self.params = {"w": torch.randn(8, 1, requires_grad=True), "b": torch.zeros(1, requires_grad=True)}

    def forward(self, x):
        return torch.tanh(self.f(x)) @ self.params["w"] + self.params["b"]


model = Net()
optimizer = optim.SGD([*model.parameters(), *model.params.values()], lr=0.02)
loader = DataLoader(TensorDataset(X, Y), batch_size=32, shuffle=True)
criterion = nn.MSELoss()

# %% accelerate
losses = []
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(epoch, round(losses[-1], 4))
