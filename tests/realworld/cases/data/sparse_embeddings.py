# Embeddings with sparse gradients and SparseAdam, a dense head with an optimizer of its own.
# outcome: equal
# compare: embedding, head
# %%
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

words, y = torch.randint(0, 30, (40, 3)), torch.randn(40, 1)
loader = DataLoader(TensorDataset(words, y), batch_size=8)
embedding = nn.EmbeddingBag(30, 5, mode="sum", sparse=True)
head = nn.Linear(5, 1)
sparse_optimizer = torch.optim.SparseAdam(embedding.parameters(), lr=0.05)
optimizer = torch.optim.SGD(head.parameters(), lr=0.05)

# %% accelerate
for epoch in range(2):
    for xb, yb in loader:
        loss = nn.functional.mse_loss(head(embedding(xb)), yb)
        sparse_optimizer.zero_grad()
        optimizer.zero_grad()
        loss.backward()
        sparse_optimizer.step()
        optimizer.step()
