# An optimizer for each parameter in hooks, everything made in the cell that trains, no loader.
# outcome: equal
# compare: model
# %% accelerate
import torch
import torch.nn as nn

x, y = torch.randn(32, 4), torch.randn(32, 1)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer_dict = {p: torch.optim.Adam([p], foreach=False) for p in model.parameters()}


def optimizer_hook(parameter) -> None:
    optimizer_dict[parameter].step()
    optimizer_dict[parameter].zero_grad()


for p in model.parameters():
    p.register_post_accumulate_grad_hook(optimizer_hook)
for step in range(6):
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
