# The first lesson: digits, a small network, an epoch function with a running loss, accuracy on held out data.
# outcome: equal
# compare: model, accuracies
# share: history
# needs: sklearn
# runs: always
# %%
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.utils.data import DataLoader, TensorDataset

digits = load_digits()
x_train, x_test, y_train, y_test = train_test_split(digits.data[:500] / 16, digits.target[:500], random_state=0)
train_set = TensorDataset(torch.tensor(x_train), torch.tensor(y_train))
test_set = TensorDataset(torch.tensor(x_test), torch.tensor(y_test))
train_loader = DataLoader(train_set, batch_size=32, shuffle=True)
test_loader = DataLoader(test_set, batch_size=64)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(64, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x):
        return self.fc2(F.relu(self.fc1(x)))


device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = Net().to(device)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

# %%
def train_one_epoch():
    model.train()
    running_loss = 0.0
    for i, (inputs, labels) in enumerate(train_loader):
        inputs, labels = inputs.to(device), labels.to(device)
        optimizer.zero_grad()
        outputs = model(inputs)
        loss = criterion(outputs, labels)
        loss.backward()
        optimizer.step()
        running_loss += loss.item()
    return running_loss / len(train_loader)


def evaluate():
    model.eval()
    correct = 0
    with torch.no_grad():
        for inputs, labels in test_loader:
            correct += (model(inputs.to(device)).argmax(dim=1) == labels.to(device)).sum().item()
    return correct / len(test_loader.dataset)

# %% accelerate
history, accuracies = [], []
for epoch in range(3):
    history.append(train_one_epoch())
    accuracies.append(evaluate())
    print(f"epoch {epoch + 1}: loss {history[-1]:.3f}, accuracy {accuracies[-1]:.2%}")
