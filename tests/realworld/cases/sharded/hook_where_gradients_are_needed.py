# The forward pass keeps the gradient of its features by a hook, which it registers only where gradients are computed.
# outcome: equal
# compare: model, sizes, norms
# %%
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

x, y = torch.randn(40, 5), torch.randint(0, 3, (40,))
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(5, 6), nn.Tanh()), nn.Linear(6, 3)
        self.kept = None

    def keep(self, gradient):
        self.kept = gradient

    def forward(self, batch):
        features = self.body(batch)
        if features.requires_grad:
            features.register_hook(self.keep)
        return self.head(features)


model = Classifier()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
sizes, norms = [], []

# %% accelerate --strategy fsdp
for epoch in range(2):
    for batch, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch), labels).backward()
        optimizer.step()
        sizes.append(len(model.kept))
        norms.append(model.kept.norm().item())
