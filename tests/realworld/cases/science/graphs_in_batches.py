# Small graphs of different sizes: nodes concatenated by the collate function with an index of their graph.
# outcome: equal
# compare: model
# %%
import torch
import torch.nn as nn
from torch.utils.data import DataLoader

graphs = []
for i in range(25):
    n = int(torch.randint(2, 6, (1,)))
    graphs.append((torch.randn(n, 3), (torch.rand(n, n) < 0.5).double(), float(i % 2)))


def collate(items):
    nodes = torch.cat([g[0] for g in items])
    adjacency = torch.block_diag(*[g[1] for g in items])
    owner = torch.cat([torch.full((len(g[0]),), i) for i, g in enumerate(items)])
    return nodes, adjacency, owner, torch.tensor([g[2] for g in items])


loader = DataLoader(graphs, batch_size=6, shuffle=True, collate_fn=collate)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.message, self.readout = nn.Linear(3, 8), nn.Linear(8, 1)

    def forward(self, nodes, adjacency, owner, count):
        h = torch.relu(self.message(nodes + adjacency @ nodes))
        pooled = torch.zeros(count, 8).index_add(0, owner, h)
        return self.readout(pooled).squeeze(1)


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

# %% accelerate
for epoch in range(2):
    for nodes, adjacency, owner, y in loader:
        loss = nn.functional.binary_cross_entropy_with_logits(model(nodes, adjacency, owner, len(y)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
