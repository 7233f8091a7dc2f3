# Reptile: an inner loop on a deep copy, the weights moved towards it by hand.
# outcome: equal
# compare: model, losses
# %%
import copy
import torch
import torch.nn as nn


def sample_task():
    amplitude, phase = 0.5 + torch.rand(1), 3 * torch.rand(1)
    return lambda x: amplitude * torch.sin(x + phase)


model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
x_all = torch.linspace(-3, 3, 20).unsqueeze(1)

# %% accelerate
losses = []
for iteration in range(4):
    task = sample_task()
    weights_before = copy.deepcopy(model.state_dict())
    y_all = task(x_all)
    for inner in range(3):
        idx = torch.randperm(len(x_all))[:8]
        model.zero_grad()
        loss = (model(x_all[idx]) - y_all[idx]).pow(2).mean()
        loss.backward()
        for p in model.parameters():
            p.data -= 0.05 * p.grad.data
    losses.append(loss.item())
    weights_after = model.state_dict()
    step = 0.5 * (1 - iteration / 4)
    model.load_state_dict({n: weights_before[n] + (weights_after[n] - weights_before[n]) * step for n in weights_before})
