# The evaluation runs in inference mode: its results stay in lists that several cells add to, and in buffers.
# outcome: equal
# compare: model, accuracies, predictions, features
# %%
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

x = torch.randn(56, 5)
y = (x.sum(1) > 0).long()
train_loader = DataLoader(TensorDataset(x[:40], y[:40]), batch_size=8, shuffle=True)
val_loader = DataLoader(TensorDataset(x[40:], y[40:]), batch_size=8)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.head = nn.Linear(5, 8), nn.Linear(8, 2)
        self.register_buffer("centre", torch.zeros(8))

    def forward(self, batch):
        return self.head(torch.relu(self.hidden(batch)))

    def measure(self, batch):
        self.centre = torch.relu(self.hidden(batch)).mean(0)


@torch.inference_mode()
def evaluate():
    model.eval()
    correct = torch.zeros(())
    for batch, labels in val_loader:
        correct += (model(batch).argmax(1) == labels).sum()
    model.measure(x)
    return correct / len(val_loader.dataset)


def train():
    model.train()
    for batch, labels in train_loader:
        loss = nn.functional.cross_entropy(model(batch), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
accuracies = [evaluate()]
with torch.inference_mode():
    features = torch.zeros(56, 8)

# %% accelerate
for epoch in range(2):
    train()
    accuracies.append(evaluate())
with torch.inference_mode():
    features[:] = model.hidden(x)

# %%
accuracies.append(evaluate())
with torch.inference_mode():
    features *= 2

# %% accelerate
train()
accuracies.append(evaluate())
with torch.inference_mode():
    predictions = model(x).argmax(1)
    features += 1
print(len(accuracies), features.mean())
