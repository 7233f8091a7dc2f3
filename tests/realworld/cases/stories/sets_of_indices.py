# Each client has a set of sample indices, as simulations of federated averaging have: copies of some are reordered.
# outcome: told sets of numbers in clients have another order on the workers
# compare: len(clients)
# %%
import copy
import numpy as np
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset

data = TensorDataset(torch.randn(60, 4), torch.randn(60, 1))
clients = {number: set(np.random.choice(60, 15, replace=False)) for number in range(4)}
model = torch.nn.Linear(4, 1)


def update(model, indices):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in DataLoader(Subset(data, list(indices)), batch_size=4):
        loss = torch.nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.state_dict()

# %% accelerate
for _ in range(2):
    states = [update(copy.deepcopy(model), indices) for indices in clients.values()]
    model.load_state_dict({key: sum(state[key] for state in states) / len(states) for key in states[0]})
