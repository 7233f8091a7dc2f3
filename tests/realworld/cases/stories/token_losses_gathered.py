# Evaluation of per-token losses with a short last batch, no gradients, a perplexity at the end.
# outcome: equal
# compare: model, perplexity, count
# %%
import math
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

ids = torch.randint(0, 12, (29, 6))
train_loader = DataLoader(TensorDataset(ids[:18]), batch_size=6, shuffle=True)
eval_loader = DataLoader(TensorDataset(ids[18:]), batch_size=4)
model = nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 12))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

# %% accelerate
for epoch in range(2):
    model.train()
    for (batch,) in train_loader:
        logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.reshape(-1, 12), batch[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    losses = []
    for (batch,) in eval_loader:
        with torch.no_grad():
            logits = model(batch[:, :-1])
        losses.append(F.cross_entropy(logits.reshape(-1, 12), batch[:, 1:].reshape(-1), reduction="none"))
    losses = torch.cat(losses)
    perplexity, count = math.exp(losses.mean()), len(losses)
