# Gradcam hook.
# outcome: equal
# compare: model, norms
# %%

import torch
import torch.nn as nn
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset

X = torch.randn(64, 1, 8, 8)
Y = torch.randint(0, 2, (64,))
loader = DataLoader(TensorDataset(X, Y), batch_size=16, shuffle=True)


class CNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU())
        self.fc = nn.Linear(4, 2)
        self.gradients = None

    def activations_hook(self, grad):
        self.gradients = grad

    def forward(self, x):
        x = self.features(x)
        if x.requires_grad:
            h = x.register_hook(self.activations_hook)
        return self.fc(x.mean((2, 3)))


model = CNN()
optimizer = optim.Adam(model.parameters(), lr=1e-2)
criterion = nn.CrossEntropyLoss()
norms = []

# %% accelerate
losses = []
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        norms.append(model.gradients.norm().item())
        losses.append(loss.item())
    print(epoch, round(losses[-1], 4))
print(tuple(model.gradients.shape), round(norms[0], 5))
