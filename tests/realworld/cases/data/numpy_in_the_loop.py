# Slices of NumPy arrays, a permutation in each epoch, metrics computed by NumPy and scikit-learn from detached outputs.
# outcome: equal
# compare: model, history
# needs: sklearn
# %%
import numpy as np
import torch
import torch.nn as nn
from sklearn.datasets import load_diabetes
from sklearn.metrics import r2_score
from sklearn.preprocessing import StandardScaler

X, y = load_diabetes(return_X_y=True)
X, y = X[:90], (y[:90] - y[:90].mean()) / y[:90].std()
scaler = StandardScaler().fit(X[:70])
X = scaler.transform(X)
model = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
batch_size = 16

# %% accelerate
history = {"loss": [], "r2": []}
for epoch in range(3):
    perm = np.random.permutation(70)
    epoch_losses = []
    for start in range(0, 70, batch_size):
        idx = perm[start:start + batch_size]
        xb, yb = torch.from_numpy(X[idx]), torch.from_numpy(y[idx])
        loss = nn.functional.mse_loss(model(xb).squeeze(-1), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        epoch_losses.append(loss.detach().numpy())
    with torch.no_grad():
        prediction = model(torch.from_numpy(X[70:])).numpy()
    history["loss"].append(np.mean(epoch_losses))
    history["r2"].append(r2_score(y[70:], prediction))
