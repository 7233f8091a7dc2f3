# SimCLR in small: two views of each sample, all against all in the batch.
# outcome: equal
# compare: encoder, projector
# %%
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

first, second = torch.randn(32, 6), torch.randn(32, 6)
loader = DataLoader(TensorDataset(first, first + 0.1 * second), batch_size=8, shuffle=True)
encoder = nn.Sequential(nn.Linear(6, 12), nn.ReLU())
projector = nn.Linear(12, 4)
optimizer = torch.optim.SGD([*encoder.parameters(), *projector.parameters()], lr=0.1)


def nt_xent(z1, z2, temperature=0.5):
    z = F.normalize(torch.cat([z1, z2]), dim=1)
    similarity = z @ z.t() / temperature
    n = len(z1)
    similarity = similarity.masked_fill(torch.eye(2 * n, dtype=torch.bool), float("-inf"))
    targets = torch.cat([torch.arange(n, 2 * n), torch.arange(n)])
    return F.cross_entropy(similarity, targets)

# %% accelerate
for epoch in range(2):
    for v1, v2 in loader:
        loss = nt_xent(projector(encoder(v1)), projector(encoder(v2)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
