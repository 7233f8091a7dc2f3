# Tokens that are mapped from a file, and predictions and counts that a cell writes to mapped files.
# outcome: equal
# compare: losses, kept, seen, later
# %%
import os
import tempfile

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

folder = tempfile.mkdtemp()
np.random.randint(0, 7, 400).astype(np.uint16).tofile(f"{folder}/tokens.bin")
tokens = np.memmap(f"{folder}/tokens.bin", dtype=np.uint16, mode="r")
train = tokens[:300]
outputs = np.memmap(f"{folder}/outputs.bin", dtype=np.float64, mode="w+", shape=(300, 7))
counts = np.memmap(f"{folder}/counts.bin", dtype=np.int64, mode="w+", shape=(300,))
model = nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 7))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)


def get_batch():
    at = torch.randint(0, len(train) - 1, (16,))
    return at, *(torch.from_numpy(train[(at + shift).numpy()].astype(np.int64)) for shift in (0, 1))


# %% accelerate
losses = []
for step in range(20):
    at, x, y = get_batch()
    out = model(x)
    loss = F.cross_entropy(out, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    outputs[at.numpy()] = out.detach().numpy()
    np.add.at(counts, at.numpy(), 1)
    losses.append(loss.item())
outputs.flush()
print(losses[-1], counts.sum())

# %%
kept = np.fromfile(f"{folder}/outputs.bin", dtype=np.float64), np.fromfile(f"{folder}/counts.bin", dtype=np.int64)
seen = np.array(outputs), np.array(counts)
counts[0] += 5

# %% accelerate
later = int(counts.sum())
outputs[:] = 1

# %%
later = later, float(np.fromfile(f"{folder}/outputs.bin", dtype=np.float64).sum())
