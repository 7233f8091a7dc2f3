# The training function counts steps, and makes a new iterator of a new loader when the last one is used up.
# outcome: equal
# compare: model, accuracies, len(batches)
# %%
import torch
import torch.nn.functional as F
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset

inputs = torch.randn(2, 40, 6)
labels = (inputs.sum(2) > 0).long()
tasks = [TensorDataset(inputs[task].roll(task, 1), labels[task]) for task in range(2)]
model = torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.ReLU(), torch.nn.Linear(12, 2))


def train(model, dataset, num_steps, batch_size):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model.train()
    num_left = 1
    for _ in range(num_steps):
        num_left -= 1
        if num_left == 0:
            batches = iter(DataLoader(dataset, batch_size=batch_size, shuffle=True, drop_last=True))
            num_left = len(batches)
        x, y = next(batches)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def accuracy(model, dataset):
    model.eval()
    with torch.no_grad():
        found = [(model(x).argmax(1) == y).double().mean() for x, y in DataLoader(dataset, batch_size=16)]
    return torch.stack(found).mean().item()


# %% accelerate
accuracies = []
for number, task in enumerate(tasks):
    train(model, task, num_steps=7, batch_size=12)
    accuracies.append([accuracy(model, other) for other in tasks[: number + 1]])

# %% accelerate
train(model, ConcatDataset(tasks), num_steps=5, batch_size=24)
batches = iter(DataLoader(tasks[0], batch_size=12))
print(len(batches))
