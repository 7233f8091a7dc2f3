# Steps by hand on sharded parameters and gradients, a distance to the start, copies of the weights.
# outcome: equal
# compare: model, best, history, total, velocity, p, saved
# %%
import copy
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

x, y = torch.randn(40, 5), torch.randn(40, 1)
loader = DataLoader(TensorDataset(x, y), batch_size=8)
model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
start = [p.detach().clone() for p in model.parameters()]
history, best = [], None

# %% accelerate --strategy fsdp
velocity = [torch.zeros_like(p) for p in model.parameters()]
for epoch in range(2):
    for xb, yb in loader:
        loss = nn.functional.mse_loss(model(xb), yb)
        loss = loss + 0.1 * sum((p - s).pow(2).sum() for p, s in zip(model.parameters(), start))
        optimizer.zero_grad()
        loss.backward()
        total = torch.norm(torch.stack([p.grad.norm() for p in model.parameters()]))
        if total > 0.5:
            for p in model.parameters():
                p.grad.mul_(0.5 / total)
        for p in model.parameters():
            p.grad = p.grad.sign() * p.grad.abs().mean() + 0.1 * p.grad
        optimizer.step()
        with torch.no_grad():
            for p, v in zip(model.parameters(), velocity):
                v.mul_(0.9).add_(p.grad)
                p -= 0.01 * v
                p.copy_(torch.where(p.abs() < 1e-3, torch.zeros_like(p), p))
    history.append(loss.item())
    best = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
    saved = copy.deepcopy(model.state_dict())
    model.load_state_dict(saved)
print(model[0].weight)
