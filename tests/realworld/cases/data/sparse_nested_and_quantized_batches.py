# Batches with a sparse adjacency matrix, with a nested tensor and with quantized numbers.
# outcome: equal
# compare: model, seen
# %%
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


def join_graphs(graphs):
    adjacency, nodes, targets = zip(*graphs)
    return torch.block_diag(*adjacency).to_sparse(), torch.cat(nodes), torch.stack(targets)


def nest(sequences):
    return torch.nested.nested_tensor(sequences), torch.stack([sequence.sum() for sequence in sequences])


graphs = DataLoader(
    [(torch.eye(5) + torch.rand(5, 5).round(), torch.randn(5, 4), torch.randn(1)) for _ in range(16)],
    batch_size=8,
    collate_fn=join_graphs,
)
sequences = DataLoader([torch.randn(n, 4) for n in (2, 5, 3, 4, 2, 1, 6, 3)], batch_size=4, collate_fn=nest)
numbers = torch.quantize_per_tensor(torch.randn(16, 4).float(), 0.1, 0, torch.qint8)
quantized = DataLoader(TensorDataset(numbers), batch_size=8)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
seen = []


def step(loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    seen.append(loss.item())


# %% accelerate
for adjacency, nodes, targets in graphs:
    seen.append(adjacency.to_dense().sum().item())
for nested, sums in sequences:
    seen.append(sums.mean().item())
for epoch in range(2):
    for adjacency, nodes, targets in graphs:
        step(F.mse_loss(torch.sparse.mm(adjacency, model(nodes)).view(-1, 5).sum(1, keepdim=True), targets))
    for nested, sums in sequences:
        step(sum((model(one).sum() - total) ** 2 for one, total in zip(nested.unbind(), sums)) / len(sums))
    for (batch,) in quantized:
        step(model(batch.dequantize().double()).pow(2).mean())
del adjacency, nested, batch
