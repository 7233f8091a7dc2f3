# MoCo queue of keys, read by worker processes.
# outcome: equal
# compare: enc_q, enc_k, queue, ptr
# %%
import copy

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset

X = torch.randn(128, 6)
loader = DataLoader(TensorDataset(X), batch_size=32, shuffle=True, num_workers=2)
enc_q = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8))
enc_k = copy.deepcopy(enc_q)
for p in enc_k.parameters():
    p.requires_grad_(False)
queue = F.normalize(torch.randn(64, 8), dim=1)
ptr = 0
optimizer = optim.SGD(enc_q.parameters(), lr=0.05)

# %% accelerate
for epoch in range(2):
    for (x,) in loader:
        q = F.normalize(enc_q(x), dim=1)
        with torch.no_grad():
            for pq, pk in zip(enc_q.parameters(), enc_k.parameters()):
                pk.mul_(0.9).add_(pq, alpha=0.1)
            k = F.normalize(enc_k(x * 0.9), dim=1)
        l_pos = (q * k).sum(1, keepdim=True)
        l_neg = q @ queue.t()
        logits = torch.cat([l_pos, l_neg], 1) / 0.2
        loss = F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        queue[ptr : ptr + len(k)] = k
        ptr = (ptr + len(k)) % 64
print("done")
