# A library derives a class from that of the model and an abstract class, and computes with other parameters.
# outcome: equal
# compare: losses, model, optimizer
# %%

import abc

import torch
import torch.nn as nn

X, Y = torch.randn(24, 3), torch.randn(24, 1)


class Base(abc.ABC):
    @abc.abstractmethod
    def parameters_of_task(self): ...


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, 3))

    def forward(self, x):
        return torch.tanh(nn.functional.linear(x, self.weight))


def with_weight(model, weight):
    class Stateless(type(model), Base):
        def __init__(self):
            nn.Module.__init__(self)
            self.weight = weight

        def parameters_of_task(self):
            return [self.weight]

    return Stateless()


model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
losses = []

# %% accelerate
for _ in range(4):
    (slope,) = torch.autograd.grad((model(X[:12]) - Y[:12]).pow(2).mean(), model.weight, create_graph=True)
    loss = (with_weight(model, model.weight - 0.5 * slope)(X[12:]) - Y[12:]).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
