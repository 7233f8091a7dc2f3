# Models are trained in threads, one at a time and at once, and by the cell itself before and between.
# outcome: equal
# compare: models, losses
# %%
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(64, 4)
y = x.sum(1, keepdim=True)
models = [nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)) for _ in range(2)]
optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in models]


def train(number, epochs):
    model, optimizer = models[number], optimizers[number]
    for _ in range(epochs):
        for start in range(0, 64, 16):
            rows = slice(start, start + 16)
            loss = (model(x[rows]) - y[rows]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return loss.item()


# %% accelerate
def run():
    losses = [train(0, 1)]
    for number in range(2):
        thread = threading.Thread(target=train, args=(number, 2))
        thread.start()
        thread.join()
    with ThreadPoolExecutor(2) as executor:
        losses += [executor.submit(train, number, 2).result() for number in range(2)]
    return [*losses, train(1, 1)]

losses = run()

# %% accelerate
threads = [threading.Thread(target=train, args=(number, 20)) for number in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
del thread, threads
