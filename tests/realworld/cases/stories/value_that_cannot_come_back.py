# The cell also binds a generator, a value of each thread and an open file: the weights must come back all the same.
# outcome: told stayed on the workers
# compare: model, losses
# runs: always
# %%
import torch
import torch.nn as nn

x, y = torch.randn(20, 3), torch.randn(20, 1)
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

# %% accelerate
import threading

own = threading.local()
log = open("log.txt", "w")
numbers = (i * i for i in range(10))
losses = []
for step in range(4):
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    log.write(f"{next(numbers)} {loss.item()}\n")
