# Backpropagation by hand keeps the gradients as attributes of tensors, which later cells read, change and delete.
# outcome: equal
# compare: x.g, w.g, w.note, output.g, found, later
# runs: always
# %%
import torch

x, w = torch.randn(8, 3), torch.randn(3, 2)
w.note, x.old = "before", 1


def backward(x, w):
    output = torch.relu(x @ w)
    output.g = 2 * output / len(x)
    x.g, w.g = output.g @ w.T, x.T @ output.g
    return output


# %% accelerate
output = backward(x, w)
w.note = "after"
del x.old

# %%
found = [output.g.sum().item(), hasattr(x, "old")]
w.g *= 2
w.steps = [1, 2]

# %% accelerate
w -= 0.1 * w.g
later = [w.g.sum().item(), w.steps, output.g.sum().item()]
