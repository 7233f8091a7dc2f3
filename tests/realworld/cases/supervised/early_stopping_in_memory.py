# Early stopping by the validation loss, with the best weights kept in memory by copy.deepcopy.
# outcome: equal
# compare: model, val_losses, best_epoch
# %%
import copy
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset, random_split

x = torch.randn(80, 5)
y = x @ torch.randn(5, 1) + 0.5 * torch.randn(80, 1)
train_set, val_set = random_split(TensorDataset(x, y), [50, 30], generator=torch.Generator().manual_seed(1))
train_loader = DataLoader(train_set, batch_size=8, shuffle=True)
val_loader = DataLoader(val_set, batch_size=30)
model = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
loss_fn = nn.MSELoss()

# %% accelerate
best_loss, best_weights, best_epoch, patience, waited = float("inf"), None, -1, 2, 0
val_losses = []
for epoch in range(12):
    model.train()
    for xb, yb in train_loader:
        loss = loss_fn(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        val_loss = sum(loss_fn(model(xb), yb).item() for xb, yb in val_loader) / len(val_loader)
    val_losses.append(val_loss)
    if val_loss < best_loss:
        best_loss, best_epoch, waited = val_loss, epoch, 0
        best_weights = copy.deepcopy(model.state_dict())
    else:
        waited += 1
        if waited > patience:
            break
model.load_state_dict(best_weights)
