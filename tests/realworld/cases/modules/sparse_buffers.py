# A graph layer whose adjacency matrices are sparse buffers of two layouts; a later cell replaces and scales them.
# outcome: equal
# compare: model.linear, out, dense, compressed, again
# %%
import torch
from torch import nn

nodes = torch.randn(12, 5)
targets = torch.randn(12, 2)


class Graph(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 2)
        links = (torch.rand(12, 12) > 0.6).to(nodes.dtype)
        self.register_buffer("adjacency", links.to_sparse())
        self.register_buffer("degrees", torch.eye(12, dtype=nodes.dtype).to_sparse_csr())

    def forward(self, x):
        return self.linear(self.degrees @ torch.sparse.mm(self.adjacency, x))


model = Graph()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def train():
    for _ in range(3):
        optimizer.zero_grad()
        (model(nodes) - targets).square().mean().backward()
        optimizer.step()


# %% accelerate
train()

# %%
out = model(nodes).detach()

# %% accelerate
model.adjacency.mul_(0.5)
model.degrees = (0.3 * torch.ones(12, 12, dtype=nodes.dtype)).to_sparse_csr()
train()

# %%
dense, compressed = model.adjacency.to_dense(), model.degrees.to_dense()
model.adjacency = torch.eye(12, dtype=nodes.dtype).to_sparse()

# %% accelerate
train()
again = model(nodes).detach()
