# A graph whose adjacency is a sparse matrix, in coordinates and in rows; a cell makes another one.
# outcome: equal
# compare: losses, accuracy, degrees, later
# %%
import torch
import torch.nn as nn
import torch.nn.functional as F

num_nodes = 40
edges = torch.randint(0, num_nodes, (2, 160))
dense = torch.zeros(num_nodes, num_nodes).index_put((edges[0], edges[1]), torch.ones(160)) + torch.eye(num_nodes)
dense = dense / dense.sum(1, keepdim=True)
adjacency, rows = dense.to_sparse(), dense.to_sparse_csr()
features, labels = torch.randn(num_nodes, 6), torch.randint(0, 3, (num_nodes,))


class GraphNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x, adjacency):
        x = F.relu(torch.sparse.mm(adjacency, self.first(x)))
        return F.log_softmax(torch.sparse.mm(adjacency, self.second(x)), dim=1)


net = GraphNet()
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)

# %% accelerate
losses = []
for epoch in range(15):
    optimizer.zero_grad()
    loss = F.nll_loss(net(features, adjacency), labels)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
accuracy = (net(features, rows).argmax(1) == labels).double().mean().item()
squared = torch.sparse.mm(adjacency, adjacency).coalesce()
print(f"{losses[-1]:.4f} {accuracy:.3f}")

# %%
degrees = squared.to_dense().sum(1)

# %% accelerate
later = torch.sparse.mm(squared, features).sum().item()
