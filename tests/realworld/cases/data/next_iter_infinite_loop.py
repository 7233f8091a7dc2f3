# while True over next(iterator), the iterator made anew at StopIteration, a number of steps, evaluation in between.
# outcome: told stayed on the workers: iterator
# compare: model, evals
# %%
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

x, y = torch.randn(44, 4), torch.randint(0, 3, (44,))
loader = DataLoader(TensorDataset(x[:30], y[:30]), batch_size=8, shuffle=True, drop_last=True)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

# %% accelerate
step, evals = 0, []
iterator = iter(loader)
while True:
    try:
        xb, yb = next(iterator)
    except StopIteration:
        iterator = iter(loader)
        xb, yb = next(iterator)
    loss = nn.functional.cross_entropy(model(xb), yb)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    step += 1
    if step % 4 == 0:
        with torch.no_grad():
            evals.append((model(x[30:]).argmax(-1) == y[30:]).double().mean().item())
    if step >= 10:
        break
