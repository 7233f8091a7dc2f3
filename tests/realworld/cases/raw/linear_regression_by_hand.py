# The tutorial's warm-up: two raw tensors, backward, an update under no_grad, gradients zeroed by hand.
# outcome: equal
# compare: w, b, losses
# %%
import torch

X = torch.randn(60, 2)
y = X @ torch.tensor([2.0, -3.4]) + 4.2 + 0.01 * torch.randn(60)
w = torch.normal(0, 0.01, size=(2,), requires_grad=True)
b = torch.zeros(1, requires_grad=True)

# %% accelerate
losses = []
for t in range(30):
    loss = ((X @ w + b - y) ** 2).mean()
    loss.backward()
    with torch.no_grad():
        w -= 0.1 * w.grad
        b -= 0.1 * b.grad
        w.grad.zero_()
        b.grad = None
    losses.append(loss.item())
