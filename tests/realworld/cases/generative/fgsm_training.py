# Adversarial training: inputs moved along the sign of their gradient, then trained on.
# outcome: equal
# compare: model
# %%
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

x, y = torch.randn(42, 5), torch.randint(0, 3, (42,))
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
epsilon = 0.1


def fgsm_attack(data, data_grad):
    return data + epsilon * data_grad.sign()

# %% accelerate
for epoch in range(2):
    for data, target in loader:
        data.requires_grad = True
        loss = F.cross_entropy(model(data), target)
        model.zero_grad()
        loss.backward()
        adversarial = fgsm_attack(data, data.grad).detach()
        loss = 0.5 * F.cross_entropy(model(data.detach()), target) + 0.5 * F.cross_entropy(model(adversarial), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
