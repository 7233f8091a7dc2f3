# A cosine classifier with an additive margin as a part of the model that takes the labels.
# outcome: equal
# compare: model
# %%
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class ArcMargin(nn.Module):
    def __init__(self, dim, classes, s=8.0, m=0.2):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(classes, dim))
        nn.init.xavier_uniform_(self.weight)
        self.s, self.m = s, m

    def forward(self, x, labels):
        cosine = F.linear(F.normalize(x), F.normalize(self.weight)).clamp(-1 + 1e-7, 1 - 1e-7)
        one_hot = F.one_hot(labels, len(self.weight))
        return self.s * torch.where(one_hot.bool(), torch.cos(torch.acos(cosine) + self.m), cosine)


class FaceModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 4))
        self.margin = ArcMargin(4, 5)

    def forward(self, x, labels):
        return self.margin(self.backbone(x), labels)


x, y = torch.randn(44, 6), torch.randint(0, 5, (44,))
loader = DataLoader(TensorDataset(x, y), batch_size=10, shuffle=True)
model = FaceModel()
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4)

# %% accelerate
for epoch in range(2):
    for xb, yb in loader:
        loss = F.cross_entropy(model(xb, yb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
