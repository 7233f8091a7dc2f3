# The tutorials' first page: a polynomial fitted to a sine with NumPy, then with tensors and manual gradients.
# outcome: equal
# compare: coefficients, grads
# %%
import math
import numpy as np
import torch

# %% accelerate
x = np.linspace(-math.pi, math.pi, 200)
y = np.sin(x)
a, b, c, d = np.random.randn(4)
for t in range(50):
    y_pred = a + b * x + c * x ** 2 + d * x ** 3
    grad = 2.0 * (y_pred - y)
    a -= 1e-6 * grad.sum()
    b -= 1e-6 * (grad * x).sum()
    c -= 1e-6 * (grad * x ** 2).sum()
    d -= 1e-6 * (grad * x ** 3).sum()
coefficients = [a, b, c, d]
tx = torch.from_numpy(x)
ta, tb = torch.randn((), requires_grad=True), torch.randn((), requires_grad=True)
grads = []
for t in range(10):
    loss = (ta + tb * tx - torch.sin(tx)).pow(2).sum()
    loss.backward()
    with torch.no_grad():
        ta -= 1e-4 * ta.grad
        tb -= 1e-4 * tb.grad
        grads.append((ta.grad.item(), tb.grad.item()))
        ta.grad = tb.grad = None
