# An average of a sharded model and of its buffers, which PyTorch updates in one call, and steps for lists of tensors.
# outcome: equal
# compare: model, average, momentum
# %%
import torch
import torch.nn as nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

x, y = torch.randn(40, 5), torch.randn(40, 1)
loader = DataLoader(TensorDataset(x, y), batch_size=8)
model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 1))
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8), use_buffers=True)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
momentum = [torch.zeros_like(p) for p in model.parameters()]

# %% accelerate --strategy fsdp
for xb, yb in loader:
    loss = nn.functional.mse_loss(model(xb), yb)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    average.update_parameters(model)
    with torch.no_grad():
        parameters = list(model.parameters())
        torch._foreach_lerp_(momentum, [p.grad for p in parameters], 0.3)
        torch._foreach_add_(parameters, momentum, alpha=-0.01)
        shrunk = torch._foreach_mul([*parameters, *model.buffers()], [0.5] * 9)
        torch._foreach_copy_(parameters[:2], [part * 1.9 for part in shrunk[:2]])
