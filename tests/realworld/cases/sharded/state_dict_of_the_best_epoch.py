# A state dict kept without a copy is in the notebook the model's present weights, also after a further cell; a clone is not.
# outcome: equal
# compare: model, best, clone, shares
# %%
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(16, 4)
y = x.sum(1, keepdim=True)

# %% accelerate --strategy fsdp
for epoch in range(4):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    if epoch == 1:
        best = model.state_dict()
        clone = {name: value.clone() for name, value in model.state_dict().items()}
model.load_state_dict(best)

# %% accelerate --strategy fsdp
for _ in range(2):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()

# %%
shares = [best[name].data_ptr() == value.data_ptr() for name, value in model.named_parameters()]
