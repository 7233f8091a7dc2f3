# A function of the notebook that appends to a log file.
# outcome: equal
# compare: model, lines
# %%
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

X = torch.randn(64, 4)
Y = X.sum(1, keepdim=True)
loader = DataLoader(TensorDataset(X, Y), batch_size=16, shuffle=True)
model = nn.Linear(4, 1)
optimizer = optim.SGD(model.parameters(), lr=0.1)


def log(text):
    with open("log.txt", "a") as file:
        file.write(text + "\n")


# %% accelerate
for epoch in range(3):
    for x, y in loader:
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    log(f"epoch {epoch}: {loss.item():.6f}")

# %%
lines = open("log.txt").read().splitlines()
