# A graph network by hand: normalized adjacency, the whole graph in each step, loss over a mask of training nodes.
# outcome: equal
# compare: model, accuracy
# %%
import torch
import torch.nn as nn
import torch.nn.functional as F

n = 24
adjacency = (torch.rand(n, n) < 0.15).double()
adjacency = ((adjacency + adjacency.t() + torch.eye(n)) > 0).double()
degree = adjacency.sum(1)
a_hat = adjacency / torch.sqrt(degree.unsqueeze(0) * degree.unsqueeze(1))
features, labels = torch.randn(n, 6), torch.randint(0, 3, (n,))
idx_train, idx_test = torch.arange(0, 14), torch.arange(14, n)


class GraphConvolution(nn.Module):
    def __init__(self, inside, outside):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inside, outside))
        nn.init.xavier_uniform_(self.weight)

    def forward(self, x, adj):
        return adj @ (x @ self.weight)


class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.gc1, self.gc2 = GraphConvolution(6, 8), GraphConvolution(8, 3)

    def forward(self, x, adj):
        return F.log_softmax(self.gc2(F.relu(self.gc1(x, adj)), adj), dim=1)


model = GCN()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)

# %% accelerate
for epoch in range(6):
    model.train()
    optimizer.zero_grad()
    output = model(features, a_hat.to_sparse())
    loss = F.nll_loss(output[idx_train], labels[idx_train])
    loss.backward()
    optimizer.step()
model.eval()
accuracy = (model(features, a_hat).max(1)[1][idx_test] == labels[idx_test]).double().mean().item()
