# A model that returns a loss of the variance of its features in the batch.
# outcome: equal
# compare: model, loss
# %%
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset

X = torch.randn(128, 6)
loader = DataLoader(TensorDataset(X), batch_size=32, shuffle=True)
class VarReg(nn.Module):
    """the model returns its loss: VICReg's variance term"""
    def __init__(self):
        super().__init__()
        self.f = nn.Linear(6, 64)
    def forward(self, x):
        z = self.f(x)
        return F.relu(3 - torch.sqrt(z.var(0) + 1e-4)).mean()
model = VarReg()
optimizer = optim.SGD(model.parameters(), lr=0.5)


# %% accelerate
for epoch in range(4):
    for (x,) in loader:
        loss = model(x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
