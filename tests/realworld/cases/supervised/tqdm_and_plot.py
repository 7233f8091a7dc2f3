# A progress bar with a postfix in the loop, a figure of the losses at the end.
# outcome: equal
# compare: model, steps
# share: losses
# %%
import matplotlib.pyplot as plt
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm.auto import tqdm

x = torch.rand(64, 3)
y = (x ** 2).sum(1)
loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
model = nn.Sequential(nn.Linear(3, 16), nn.SiLU(), nn.Linear(16, 1), nn.Flatten(0))
optimizer = torch.optim.NAdam(model.parameters(), lr=0.01)

# %% accelerate
losses, steps = [], 0
for epoch in range(3):
    bar = tqdm(loader, desc=f"epoch {epoch}", leave=False)
    for xb, yb in bar:
        optimizer.zero_grad()
        loss = nn.functional.huber_loss(model(xb), yb)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        steps += 1
        bar.set_postfix(loss=f"{loss.item():.3f}")
plt.plot(losses)
plt.xlabel("step")
plt.show()
