# An object whose `__getstate__` removes an attribute of the object itself keeps it, also on the workers.
# outcome: equal
# compare: losses, wrapper.model, model, wrapper.num_calls
# %%

import torch
import torch.nn as nn


class Wrapper:
    def __init__(self, model):
        self.held = (model,)
        self.num_calls = 0

    @property
    def model(self):
        return self.held[0]

    def __call__(self, x):
        self.num_calls += 1
        return self.model(x)

    def __getstate__(self):
        self.held = None
        return dict(vars(self))

    def __setstate__(self, state):
        vars(self).update(state)


class Guide(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.held = (model,)
        self.shift = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return self.held[0](x) + self.shift

    def __getstate__(self):
        self.held = None
        return super().__getstate__() if hasattr(super(), "__getstate__") else dict(vars(self))


X, Y = torch.randn(32, 4), torch.randn(32, 1)
model = nn.Linear(4, 1)
wrapper, guide = Wrapper(model), Guide(model)
optimizer = torch.optim.SGD([*model.parameters(), *guide.parameters()], lr=0.1)
losses = []

# %% accelerate
for _ in range(3):
    loss = (wrapper(X) + guide(X) - Y).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())

# %%
losses.append((wrapper(X) + guide(X) - Y).pow(2).mean().item())

# %% accelerate
losses.append((wrapper(X) + guide(X) - Y).pow(2).mean().item())
