# A loss module with proxies as parameters of its own, stepped by a second optimizer.
# outcome: equal
# compare: net, proxy_loss
# %%
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class ProxyLoss(nn.Module):
    def __init__(self, classes, dim):
        super().__init__()
        self.proxies = nn.Parameter(torch.randn(classes, dim))

    def forward(self, embeddings, labels):
        logits = F.normalize(embeddings, dim=1) @ F.normalize(self.proxies, dim=1).t()
        return F.cross_entropy(8 * logits, labels)


x, y = torch.randn(36, 5), torch.randint(0, 4, (36,))
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
proxy_loss = ProxyLoss(4, 3)
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
loss_optimizer = torch.optim.SGD(proxy_loss.parameters(), lr=0.1)

# %% accelerate
for epoch in range(2):
    for xb, yb in loader:
        optimizer.zero_grad()
        loss_optimizer.zero_grad()
        loss = proxy_loss(net(xb), yb)
        loss.backward()
        optimizer.step()
        loss_optimizer.step()
