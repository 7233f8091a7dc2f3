# Gradients that DeepSpeed holds are clipped, read and changed as parameter.grad; the optimizer's state is saved whole.
# outcome: equal
# needs: deepspeed
# compare: model, norms, saved
# %%
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float32)
x, y = 3 * torch.randn(45, 4), torch.randn(45, 2)
loader = DataLoader(TensorDataset(x, y), batch_size=8)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

# %% accelerate --strategy deepspeed
norms = []
for xb, yb in loader:
    model.zero_grad()
    nn.functional.mse_loss(model(xb), yb).backward()
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.2)
    model[0].weight.grad.data *= 0.5
    model[2].bias.grad = model[2].bias.grad + 0.1
    norms.append(sum(p.grad.norm(2).item() ** 2 for p in model.parameters()) ** 0.5)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
saved = [round(float(values["momentum_buffer"].sum()), 5) for values in optimizer.state_dict()["state"].values()]
