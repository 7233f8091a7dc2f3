# Steps along random directions by derivatives in forward mode, with torch.func.jvp and with dual tensors.
# outcome: equal
# compare: model, losses, slopes
# %%
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn as nn
from torch.func import functional_call, jvp
from torch.utils.data import DataLoader, TensorDataset

x, y = torch.randn(40, 4), torch.randn(40, 1)
loader = DataLoader(TensorDataset(x, y), batch_size=8)
model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
losses, slopes = [], []

# %% accelerate
for xb, yb in loader:
    parameters = dict(model.named_parameters())
    directions = {name: torch.randn_like(p) for name, p in parameters.items()}
    loss, slope = jvp(
        lambda values: nn.functional.mse_loss(functional_call(model, values, (xb,)), yb), (parameters,), (directions,)
    )
    optimizer.zero_grad()
    for name, p in parameters.items():
        p.grad = (slope * directions[name]).detach()
    optimizer.step()
    losses.append(loss.item())
    with forward_ad.dual_level():
        output = model(forward_ad.make_dual(xb, torch.ones_like(xb)))
        slopes.append(forward_ad.unpack_dual(output).tangent.sum().item())
