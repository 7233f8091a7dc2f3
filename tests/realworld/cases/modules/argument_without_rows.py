# A model's argument without a dim for the samples, which other trained values follow from.
# outcome: equal
# compare: losses, encoder, head, optimizer, scale, gradient
# %%

import torch
import torch.nn as nn

X, Y, context = torch.randn(12, 5), torch.randn(12), torch.randn(7, 3)


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(5, 4)

    def forward(self, x, style, scale=None):
        out = torch.tanh(self.inner(x)) * style
        return out.sum(1) if scale is None else (out * scale).sum(1)


encoder, head = nn.Linear(3, 4), Head()
optimizer = torch.optim.SGD([*encoder.parameters(), *head.parameters()], lr=0.1)
scale = torch.ones(4, requires_grad=True)
losses = []

# %% accelerate
for _ in range(4):
    style = encoder(context).mean(0)
    loss = (head(X, style, scale=scale) - Y).pow(2).mean() + 0.1 * style.pow(2).sum()
    optimizer.zero_grad()
    loss.backward()
    losses.append(loss.item())
    optimizer.step()
    with torch.no_grad():
        gradient = scale.grad.clone()
        scale -= 0.1 * scale.grad
        scale.grad = None

# %% accelerate
for _ in range(3):
    style = encoder(context).mean(0)
    (slope,) = torch.autograd.grad(head(X, style).pow(2).mean(), style, create_graph=True)
    loss = (head(X, style) - Y).pow(2).mean() + slope.pow(2).sum()
    optimizer.zero_grad()
    loss.backward()
    losses.append(loss.item())
    optimizer.step()
