# A grid of learning rates and sizes, a model for each, the best by validation kept.
# outcome: equal
# compare: results, best_config, best_model
# %%
import itertools
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(11)
x = torch.randn(60, 4)
y = torch.sin(x[:, :1]) + x[:, 1:2]
train_loader = DataLoader(TensorDataset(x[:44], y[:44]), batch_size=11, shuffle=True)
grid = {"lr": [0.01, 0.1], "hidden": [4, 12]}

# %% accelerate
results, best = [], float("inf")
for values in itertools.product(*grid.values()):
    config = dict(zip(grid, values))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, config["hidden"]), nn.Tanh(), nn.Linear(config["hidden"], 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9, nesterov=True)
    for epoch in range(3):
        for xb, yb in train_loader:
            optimizer.zero_grad()
            loss = nn.functional.smooth_l1_loss(model(xb), yb)
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        score = nn.functional.mse_loss(model(x[44:]), y[44:]).item()
    results.append({**config, "score": score})
    if score < best:
        best, best_config, best_model = score, config, model
