# Threads of a cell evaluate a model at the same time, train models of their own, and train a model of the notebook.
# outcome: equal
# compare: model, trained, scores, losses
# %%
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

x, y = torch.randn(24, 4), torch.randint(0, 3, (24,))
loader = DataLoader(TensorDataset(x, y), batch_size=6)
model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []


def evaluate(part):
    with torch.no_grad():
        return nn.functional.cross_entropy(model(x[part::3]), y[part::3]).item()


def train(number):
    net = nn.Sequential(nn.Linear(4, 5 + number), nn.BatchNorm1d(5 + number), nn.Tanh(), nn.Linear(5 + number, 3))
    generator = torch.Generator().manual_seed(number)
    with torch.no_grad():
        for value in net.parameters():
            value.copy_(torch.rand(value.shape, generator=generator))
    steps = torch.optim.SGD(net.parameters(), lr=0.1)
    for xb, yb in loader:
        steps.zero_grad()
        nn.functional.cross_entropy(net(xb), yb).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        steps.step()
    return net


def run():
    for xb, yb in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(xb), yb)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())


# %% accelerate
run()
model.eval()
with ThreadPoolExecutor(3) as pool:
    scores = list(pool.map(evaluate, range(3)))
    trained = list(pool.map(train, range(4)))
del pool

# %% accelerate
model.train()
thread = threading.Thread(target=run)
thread.start()
thread.join()
del thread
run()
