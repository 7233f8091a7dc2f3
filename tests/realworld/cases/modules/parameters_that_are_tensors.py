# A module whose weights are plain tensors, which its own `parameters` returns.
# outcome: equal
# compare: model.weight, model.bias, losses
# runs: always
# %%
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class Softmax(nn.Module):
    def __init__(self, features, classes):
        super().__init__()
        self.weight = torch.normal(0, 0.1, (features, classes), requires_grad=True)
        self.bias = torch.zeros(classes, requires_grad=True)

    def parameters(self):
        return [self.weight, self.bias]

    def forward(self, x):
        return x.flatten(1) @ self.weight + self.bias


class OwnSgd:
    def __init__(self, tensors, lr):
        self.tensors, self.lr = tensors, lr

    def zero_grad(self):
        for tensor in self.tensors:
            if tensor.grad is not None:
                tensor.grad.zero_()

    def step(self):
        with torch.no_grad():
            for tensor in self.tensors:
                tensor -= self.lr * tensor.grad


loader = DataLoader(TensorDataset(torch.randn(90, 2, 3), torch.randint(0, 4, (90,))), batch_size=16, shuffle=True)
model = Softmax(6, 4)
optimizer = OwnSgd(model.parameters(), lr=0.2)
losses = []

# %% accelerate
for epoch in range(2):
    total = 0.0
    for xb, yb in loader:
        loss = F.cross_entropy(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() * len(xb)
    losses.append(total)
