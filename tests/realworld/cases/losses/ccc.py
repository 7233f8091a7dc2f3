# The concordance correlation of a batch, as in affect recognition.
# outcome: equal
# compare: model
# %%
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

x = torch.randn(48, 4)
y = x[:, :1] * 2 + torch.randn(48, 1)
loader = DataLoader(TensorDataset(x, y), batch_size=12)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)


class CCCLoss(nn.Module):
    def forward(self, p, t):
        pm, tm = torch.mean(p), torch.mean(t)
        cov = torch.mean((p - pm) * (t - tm))
        return 1 - 2 * cov / (torch.var(p, unbiased=False) + torch.var(t, unbiased=False) + (pm - tm) ** 2)


criterion = CCCLoss()

# %% accelerate
for xb, yb in loader:
    loss = criterion(model(xb), yb)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
