# Low-rank adapters replace the layers of a model that has further names, which the cell does not use.
# outcome: equal
# compare: model, history, whole[0] is model, _ is model, head is model.head, list(head.state_dict())
# %%
import torch
from torch import nn


class Adapted(nn.Module):
    def __init__(self, linear, rank):
        super().__init__()
        self.linear = linear
        self.rank = rank
        self.down = nn.Parameter(torch.randn(linear.in_features, rank))
        self.up = nn.Parameter(torch.zeros(rank, linear.out_features))

    def forward(self, x):
        return self.linear(x) + x @ self.down @ self.up


def adapt(module, rank):
    for _ in range(1):
        for name, child in module.named_children():
            if isinstance(child, nn.Linear):
                setattr(module, name, Adapted(child, rank))
            else:
                adapt(child, rank)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 6)
        self.head = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))

    def forward(self, x):
        return self.head(torch.relu(self.body(x)))


x, y = torch.randn(24, 4), torch.randint(0, 3, (24,))
history = []
model = Net()
head = model.head
whole = nn.Sequential(model, nn.Softmax(dim=1))
model.to("cpu")

# %% accelerate
for parameter in model.parameters():
    parameter.requires_grad = False
adapt(model, 2)
optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
for _step in range(4):
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())
