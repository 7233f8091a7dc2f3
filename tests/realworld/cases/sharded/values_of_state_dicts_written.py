# Weights written through the values of state dicts: decay, and a target network that follows a model.
# outcome: equal
# compare: model, target, losses
# runs: always
# %%
import torch
import torch.nn as nn

model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
target = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
samples = torch.utils.data.TensorDataset(torch.randn(40, 5), torch.randn(40, 1))
loader = torch.utils.data.DataLoader(samples, batch_size=16)
losses = []

# %% accelerate --strategy fsdp
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        loss = ((model(x) - y) ** 2 + 0.1 * (model(x) - target(x).detach()) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        for value in model.state_dict().values():
            value.mul_(0.9)
        online = model.state_dict()
        for name, value in target.state_dict().items():
            value.copy_(0.9 * value + 0.1 * online[name])
    state = target.state_dict()
    state["0.weight"][0] = 1.0
    state["2.weight"].data[:] += 0.1
    model.state_dict()["2.bias"].fill_(3.0)
