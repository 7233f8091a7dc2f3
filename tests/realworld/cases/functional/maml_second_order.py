# MAML: an inner step with create_graph, functional_call with the adapted weights, the outer optimizer on the meta loss.
# outcome: equal
# compare: model
# %%
import torch
import torch.nn as nn
from torch.func import functional_call

model = nn.Sequential(nn.Linear(1, 12), nn.Tanh(), nn.Linear(12, 1))
meta_optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
tasks = torch.rand(12, 2) * 3

# %% accelerate
for step in range(3):
    meta_loss = 0.0
    for amplitude, phase in tasks[4 * step: 4 * step + 4]:
        xs, xq = torch.randn(5, 1), torch.randn(5, 1)
        ys, yq = amplitude * torch.sin(xs + phase), amplitude * torch.sin(xq + phase)
        params = dict(model.named_parameters())
        inner = nn.functional.mse_loss(functional_call(model, params, (xs,)), ys)
        grads = torch.autograd.grad(inner, params.values(), create_graph=True)
        adapted = {name: p - 0.1 * g for (name, p), g in zip(params.items(), grads)}
        meta_loss = meta_loss + nn.functional.mse_loss(functional_call(model, adapted, (xq,)), yq)
    meta_optimizer.zero_grad()
    (meta_loss / 4).backward()
    meta_optimizer.step()
