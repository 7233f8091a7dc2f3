# k-fold cross validation with scikit-learn's KFold, a fresh model in each fold, scores collected.
# outcome: equal
# compare: scores, model
# needs: sklearn
# %%
import numpy as np
import torch
import torch.nn as nn
from sklearn.datasets import load_iris
from sklearn.model_selection import KFold
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

iris = load_iris()
dataset = TensorDataset(torch.tensor(iris.data), torch.tensor(iris.target))
loss_function = nn.CrossEntropyLoss()


def reset_weights(m):
    for layer in m.children():
        if hasattr(layer, "reset_parameters"):
            layer.reset_parameters()

# %% accelerate
scores = {}
for fold, (train_ids, test_ids) in enumerate(KFold(n_splits=3, shuffle=True, random_state=0).split(iris.data)):
    train_loader = DataLoader(dataset, batch_size=20, sampler=SubsetRandomSampler(train_ids))
    test_loader = DataLoader(dataset, batch_size=20, sampler=SubsetRandomSampler(test_ids))
    model = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 3))
    model.apply(reset_weights)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for epoch in range(2):
        for inputs, targets in train_loader:
            optimizer.zero_grad()
            loss = loss_function(model(inputs), targets)
            loss.backward()
            optimizer.step()
    correct = total = 0
    with torch.no_grad():
        for inputs, targets in test_loader:
            predicted = model(inputs).argmax(1)
            total += targets.size(0)
            correct += (predicted == targets).sum().item()
    scores[fold] = 100.0 * correct / total
print(f"average {np.mean(list(scores.values())):.1f}%")
