# Scripted and traced models are trained, alone, before another model and as a part of one; they stay on the workers.
# outcome: told stayed on the workers
# compare: losses, weights, head
# %%
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self, part):
        super().__init__()
        self.part, self.last = part, nn.Linear(3, 3)

    def forward(self, x):
        return self.last(self.part(x))


x, y = torch.randn(20, 4), torch.randint(0, 3, (20,))
loader = DataLoader(TensorDataset(x, y), batch_size=6, shuffle=True)
head = nn.Linear(3, 3)
losses = []


def train(predict, parameters):
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for xb, yb in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(predict(xb), yb)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())


# %% accelerate
scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)))
traced = torch.jit.trace(nn.Linear(4, 3), x)
net = Net(torch.jit.script(nn.Linear(4, 3)))
train(scripted, scripted.parameters())
train(lambda xb: head(traced(xb)), [*traced.parameters(), *head.parameters()])
train(net, net.parameters())
weights = [value.detach().clone() for model in (scripted, traced, net) for value in model.parameters()]
