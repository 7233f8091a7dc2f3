# One trunk and three heads: regression, classification, and a binary head, weighted means added.
# outcome: equal
# compare: model
# %%
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class MultiTask(Dataset):
    def __init__(self, n=43):
        g = torch.Generator().manual_seed(4)
        self.x = torch.randn(n, 6, generator=g)
        self.age = self.x[:, 0] * 10 + 40
        self.kind = torch.randint(0, 4, (n,), generator=g)
        self.flag = torch.randint(0, 2, (n,), generator=g).double()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"features": self.x[i], "targets": {"age": self.age[i], "kind": self.kind[i], "flag": self.flag[i]}}


class MultiHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 16), nn.ReLU())
        self.heads = nn.ModuleDict({"age": nn.Linear(16, 1), "kind": nn.Linear(16, 4), "flag": nn.Linear(16, 1)})

    def forward(self, x):
        h = self.trunk(x)
        return {name: head(h).squeeze(-1) for name, head in self.heads.items()}


loader = DataLoader(MultiTask(), batch_size=8, shuffle=True)
model = MultiHead()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

# %% accelerate
for epoch in range(2):
    for batch in loader:
        out, targets = model(batch["features"]), batch["targets"]
        loss_age = F.mse_loss(out["age"], targets["age"])
        loss_kind = F.cross_entropy(out["kind"], targets["kind"])
        loss_flag = F.binary_cross_entropy_with_logits(out["flag"], targets["flag"])
        loss = 0.01 * loss_age + loss_kind + 0.5 * loss_flag
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
