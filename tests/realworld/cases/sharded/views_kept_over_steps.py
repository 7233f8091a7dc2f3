# State dicts, rows and arrays that were taken before steps show the later weights, and writes into them change these.
# outcome: equal
# compare: model, shown, later, vector, row
# runs: always
# %%
import torch
import torch.nn as nn

model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
samples = torch.utils.data.TensorDataset(torch.randn(40, 5), torch.randn(40, 1))
loader = torch.utils.data.DataLoader(samples, batch_size=16)


def train():
    for x, y in loader:
        optimizer.zero_grad()
        ((model(x) - y) ** 2).mean().backward()
        optimizer.step()


# %% accelerate --strategy fsdp
train()
state = model.state_dict()
row = model[2].weight.detach()[0, 2:5]
column = model[0].weight.detach()[:, 1][1:].detach()
vector = model[2].bias.detach().numpy()
train()
shown = [state["0.weight"].clone(), row.clone(), column.clone(), vector.copy()]
row.add_(1.0)
vector -= 0.5
train()

# %%
train()
row.mul_(0.5)

# %% accelerate --strategy fsdp
later = [state["0.weight"].clone(), row.clone(), vector.copy()]
train()
row.add_(1.0)
train()
later += [row.clone(), model[2].weight.detach().clone()]
