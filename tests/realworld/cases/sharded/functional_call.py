# functional_call of a sharded model, with other parameters than its own.
# outcome: refused functional_call of a Sequential
# compare: model
# %%
import torch
import torch.nn as nn
from torch.func import functional_call, grad, vmap

x, y = torch.randn(32, 4), torch.randint(0, 3, (32,))
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def compute_loss(params, sample, target):
    out = functional_call(model, params, (sample.unsqueeze(0),))
    return nn.functional.cross_entropy(out, target.unsqueeze(0))

# %% accelerate --strategy fsdp
for start in range(0, 32, 8):
    params = {k: v.detach() for k, v in model.named_parameters()}
    grads = vmap(grad(compute_loss), in_dims=(None, 0, 0))(params, x[start:start + 8], y[start:start + 8])
    norms = torch.sqrt(sum(g.flatten(1).pow(2).sum(1) for g in grads.values()))
    factor = (1.0 / (norms + 1e-6)).clamp(max=1.0)
    for name, p in model.named_parameters():
        p.grad = torch.einsum("n,n...->...", factor, grads[name]) / 8
    optimizer.step()
