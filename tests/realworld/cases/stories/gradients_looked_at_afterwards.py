# Gradients of raw tensors, leaves and retained ones, are read in the cell after the one that computed them.
# outcome: equal
# compare: weights, found, hidden.grad
# %%
import torch

x, y = torch.randn(10, 4), torch.randint(3, (10,))
weights = [torch.randn(4, 5, requires_grad=True), torch.randn(5, 3, requires_grad=True)]

# %% accelerate
for _ in range(3):
    for p in weights:
        p.grad = None
    hidden = torch.tanh(x @ weights[0])
    hidden.retain_grad()
    loss = torch.nn.functional.cross_entropy(hidden @ weights[1], y)
    loss.backward()
    for p in weights:
        p.data -= 0.1 * p.grad

# %%
found = [p.grad.norm().item() for p in weights] + [hidden.grad.abs().mean().item()]
for p in weights:
    p.data -= 0.1 * p.grad

# %% accelerate
for p in weights:
    p.data -= 0.1 * p.grad
