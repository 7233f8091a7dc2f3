# A meta-learner whose `forward` adapts to each task, runs the backward pass and steps its own optimizer.
# outcome: equal
# compare: losses, learner, learner.optimizer, other
# %%

import torch
import torch.nn as nn
import torch.nn.functional as F


class Learner(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.01)

    def compute(self, weights, x):
        return torch.func.functional_call(self.net, dict(zip(dict(self.net.named_parameters()), weights)), (x,))

    def forward(self, support, query):
        total = 0.0
        for (xs, ys), (xq, yq) in zip(support, query):
            weights = list(self.net.parameters())
            for _ in range(2):
                grads = torch.autograd.grad(F.mse_loss(self.compute(weights, xs), ys), weights, create_graph=True)
                weights = [weight - 0.1 * grad for weight, grad in zip(weights, grads)]
            total = total + F.mse_loss(self.compute(weights, xq), yq)
        self.optimizer.zero_grad()
        total.backward()
        self.optimizer.step()
        return total.item()


def tasks(number):
    found = [torch.randn(6, 2) for _ in range(number)]
    return [(x, x.sum(1, keepdim=True).sin()) for x in found]


learner, other = Learner(), nn.Linear(2, 1)
losses = []

# %% accelerate
for _ in range(5):
    losses.append(learner(tasks(3), tasks(3)))

# %% accelerate
optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
for _ in range(3):
    x = torch.randn(8, 2)
    losses.append(learner(tasks(2), tasks(2)))
    loss = (other(x) + learner.net(x) - 1).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
